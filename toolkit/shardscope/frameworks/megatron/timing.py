"""What Megatron-core sends in one step: gradients once, and with the distributed optimizer parameters too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.core.arrays.arithmetic import ceil_div, largest, where
from shardscope.core.precision import FP32, widths
from shardscope.frameworks.megatron.memory.precision_aware import reduces_in_fp32
from shardscope.frameworks.megatron.memory.replicas import replicas_of
from shardscope.timing.traffic import Beneath, Collective, Overlap, StateTraffic, Transfer

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage

SCHEDULES = {
    "1f1b": "forward_backward_pipelining_without_interleaving",
    "interleaved": "forward_backward_pipelining_with_interleaving",
}
"""megatron/core/pipeline_parallel/schedules.py."""
BUCKET_WEIGHTS = 40_000_000
"""megatron/core/distributed/distributed_data_parallel.py: max(40,000,000, 1,000,000 x ranks) a bucket."""


def state_traffic(plan: Plan, stage: Stage) -> StateTraffic:
    """After the last micro-batch, in the type of the gradients' buffers; beneath its backward if so chosen.

    ``gradient_accumulation_fusion`` adds weights' gradients to the main gradients as they are made: read and
    written in place of what a product writes.
    """
    layout: Any = plan.layout
    degrees, replicas = plan.degrees, replicas_of(plan)
    half = widths[plan.recipe.precision].compute
    width = FP32 if reduces_in_fp32(layout, plan.recipe) else half
    beneath: Beneath = "last_backward" if layout.overlap_grad_reduce else "nothing"
    dense, experts = stage.layers + stage.edges, stage.experts
    added = plan.num_micro_batches * (dense + experts) * 2 * width
    if not plan.architecture.num_moe_layers:
        groups = [(dense, replicas.dense, degrees.tp)]
    else:
        # Experts have buffers and a group of their own with ep only, whose ranks lie outside of ep's
        # (parallel_state.py, "tp-cp-ep-dp-pp").
        apart = (degrees.ep > 1) & (experts > 0)
        groups = [
            (dense + where(apart, 0, experts), replicas.dense, degrees.tp),
            (where(apart, experts, 0), where(apart, replicas.experts, 1), layout.expert_tp * degrees.ep),
        ]
    transfers: list[Transfer] = []
    for weights, ranks, stride in groups:
        buckets = 1
        if layout.overlap_grad_reduce:
            buckets = largest(1, ceil_div(weights, largest(BUCKET_WEIGHTS, 1_000_000 * replicas.dense)))
        shards: bool = layout.distributed_optimizer
        how: Collective = "reduce_scatter" if shards else "all_reduce"
        transfers.append(Transfer("gradients", how, weights * width, ranks, stride, 1, buckets, beneath))
        if shards:
            meets: Beneath = "first_forward" if layout.overlap_param_gather else "nothing"
            gathered = Transfer("gathers", "all_gather", weights * half, ranks, stride, 1, buckets, meets)
            transfers.append(gathered)
    updated = dense + experts
    if layout.distributed_optimizer:
        updated = dense / replicas.dense + experts / replicas.experts
    return StateTraffic(
        tuple(transfers), copied_for_gradients=added, updated=updated, main_copies=half < FP32
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
        # One fused pass reads a part and reads and writes the sum, all in 2 bytes (Transformer Engine,
        # attention/dot_product_attention/context_parallel.py, flash_attn_fwd_out_correction; dq the same).
        merges=(6, 6),
        sends=plan.degrees.vpp > 1,
        stops_early=False,
    )
