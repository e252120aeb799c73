"""What DDP sends in one step: gradients, averaged once, while the last backward goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.arrays.arithmetic import largest
from shardscope.core.precision import FP32, widths
from shardscope.timing.traffic import Overlap, StateTraffic, Transfer

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage

SCHEDULES: dict[str, str] = {}
"""It has no pipeline."""
BUCKET_BYTES = 25 * 2**20
OVERLAP = Overlap()


def state_traffic(plan: Plan, stage: Stage) -> StateTraffic:
    """One all-reduce of all trained weights, in buckets (Li et al. 2020, section 3.2).

    The first micro-batch's gradients become ``.grad``, others are added; autocast casts them from half. What
    the reducer averages are views of its buckets.
    """
    width, weights = widths[plan.recipe.precision], stage.trainable
    num_bytes = weights * width.original
    messages = largest(1.0, num_bytes / BUCKET_BYTES)
    cast = width.compute + FP32 if width.compute < width.original else 0
    added = 3 * width.original * (plan.num_micro_batches - 1) + 2 * width.original
    transfer = Transfer(
        "gradients", "all_reduce", num_bytes, plan.world_size, 1, 1, messages, "last_backward"
    )
    return StateTraffic(
        (transfer,),
        copied_for_gradients=weights * (plan.num_micro_batches * cast + added),
        # Autocast casts every trained matrix once a micro-batch; a frozen base is in half precision already.
        copied_for_gathers=(cast > 0) * plan.num_micro_batches * weights * (FP32 + width.compute),
        updated=weights,
    )


def overlap(plan: Plan) -> Overlap:
    """DDP has no other collectives."""
    return OVERLAP
