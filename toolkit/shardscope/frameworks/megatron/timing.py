"""What Megatron-core sends in one step: gradients once, and with the distributed optimizer parameters too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.frameworks.megatron.precision_aware import reduces_in_fp32
from shardscope.memory.precision import FP32, widths
from shardscope.timing.traffic import StateTraffic, Transfer, weights_of

if TYPE_CHECKING:
    from shardscope.plan import Plan


def state_traffic(plan: Plan) -> StateTraffic:
    """After the last micro-batch, in the type of the gradients' buffers.

    Nothing overlaps (``overlap_grad_reduce`` is off by default).
    """
    layout: Any = plan.layout
    degrees, weights = plan.degrees, weights_of(plan)
    ranks, stride = degrees.data_parallel * degrees.cp, degrees.tp
    half = widths[plan.recipe.precision].compute
    gradients = weights.trained * (FP32 if reduces_in_fp32(layout, plan.recipe) else half)
    if not layout.distributed_optimizer:
        return StateTraffic((Transfer("all_reduce", gradients, ranks, stride, 1, part="gradients"),))
    parameters = weights.trained * half
    return StateTraffic(
        (
            Transfer("reduce_scatter", gradients, ranks, stride, 1, part="gradients"),
            Transfer("all_gather", parameters, ranks, stride, 1),
        )
    )
