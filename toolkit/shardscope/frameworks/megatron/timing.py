"""What Megatron-core sends in one step: gradients once, and with the distributed optimizer parameters too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.frameworks.megatron.precision_aware import reduces_in_fp32
from shardscope.memory.arithmetic import by_value, ceil_div, largest
from shardscope.memory.precision import FP32, widths
from shardscope.timing.traffic import Beneath, Overlap, StateTraffic, Transfer

if TYPE_CHECKING:
    from shardscope.memory.stages import Stage
    from shardscope.plan import Plan

BUCKET_WEIGHTS = 40_000_000
"""megatron/core/distributed/distributed_data_parallel.py: max(40,000,000, 1,000,000 x ranks) a bucket."""


def state_traffic(plan: Plan, stage: Stage) -> StateTraffic:
    """After the last micro-batch, in the type of the gradients' buffers; beneath its backward if so chosen.

    ``gradient_accumulation_fusion`` adds weights' gradients to the main gradients as they are made: read and
    written in place of what a product writes.
    """
    layout: Any = plan.layout
    degrees = plan.degrees
    ranks, stride = by_value(degrees.data_parallel * degrees.cp), degrees.tp
    half = widths[plan.recipe.precision].compute
    width = FP32 if reduces_in_fp32(layout, plan.recipe) else half
    gradients, parameters = stage.trainable * width, stage.trainable * half
    buckets = 1
    if layout.overlap_grad_reduce:
        buckets = largest(1, ceil_div(stage.trainable, largest(BUCKET_WEIGHTS, 1_000_000 * ranks)))
    beneath: Beneath = "last_backward" if layout.overlap_grad_reduce else "nothing"
    added = plan.num_micro_batches * stage.trainable * 2 * width
    if not layout.distributed_optimizer:
        reduced = Transfer("gradients", "all_reduce", gradients, ranks, stride, 1, buckets, beneath)
        return StateTraffic(
            (reduced,), copied_for_gradients=added, updated=stage.trainable, main_copies=half < FP32
        )
    gather = Transfer("gathers", "all_gather", parameters, ranks, stride, 1, buckets)
    if layout.overlap_param_gather:
        gather = gather._replace(beneath="first_forward")
    return StateTraffic(
        (Transfer("gradients", "reduce_scatter", gradients, ranks, stride, 1, buckets, beneath), gather),
        copied_for_gradients=added,
        updated=stage.trainable / ranks,
        main_copies=half < FP32,
    )


def overlap(plan: Plan) -> Overlap:
    """By megatron/core/tensor_parallel/layers.py, Transformer Engine's user buffers, and its schedules.

    Megatron-LM sends beneath arithmetic where stages are interleaved (``overlap_p2p_comm``); its own
    checkpoint function runs a whole layer again.
    """
    layout: Any = plan.layout
    return Overlap(
        tensor_forward=layout.tp_comm_overlap,
        tensor_backward=True,
        gathers_input_again=not layout.tp_comm_overlap,
        context="ring",
        sends=plan.degrees.vpp > 1,
        stops_early=False,
    )
