"""Communication of one Megatron-core step: gradient reduction and the parameter all-gather."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.ops import ceil_div, maximum, minimum, where
from shardscope.core.precision import FP32, widths
from shardscope.frameworks.megatron.core_config import MAKE_VOCAB_SIZE_DIVISIBLE_BY
from shardscope.frameworks.megatron.layout import count_replicas, get_layout
from shardscope.frameworks.megatron.memory.precision_aware import reduces_in_fp32
from shardscope.memory.state.stages import count_vocab_rows
from shardscope.timing.parallel import list_tied_reductions
from shardscope.timing.traffic import Collective, Overlap, OverlappedWith, StateTraffic, Transfer

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage

SCHEDULES = {
    "1f1b": "forward_backward_pipelining_without_interleaving",
    "interleaved": "forward_backward_pipelining_with_interleaving",
}
"""Schedule -> its function in megatron/core/pipeline_parallel/schedules.py."""
BUCKET_WEIGHTS = 40_000_000
"""Minimum elements of a gradient bucket: max(40,000,000, 1,000,000 x ranks)
(megatron/core/distributed/distributed_data_parallel.py)."""


def state_traffic(plan: Plan, stage: Stage) -> StateTraffic:
    """Return the collectives of one step, in the dtype of the gradient buffers.

    Gradients are reduced after the last micro-batch, overlapped with its backward if
    ``overlap_grad_reduce``. ``gradient_accumulation_fusion`` adds each weight gradient to the main gradient
    in the matmul kernel: a read and a write of the main gradient replace the matmul's own write. Once a step
    the buffer is zeroed and, before the reduction, scaled by 1 / replicas (distributed_data_parallel.py,
    ``zero_grad_buffer``; param_and_grad_buffer.py, ``start_grad_sync``).

    Interleaved, each model chunk has a buffer of its own, and the schedule starts its collectives: all but
    the last chunk's reduction and the first chunk's all-gather have other chunks' compute to overlap with
    (schedules.py, ``grad_sync_func`` and ``param_sync_func``). Without interleaving no schedule starts an
    all-gather: each stage's is started by its first module, which has then received its input. Stages but
    the first have one bucket (distributed_data_parallel.py, ``pp_rank > 0``), of which all is waited for.
    """
    layout = get_layout(plan)
    degrees, replicas = plan.degrees, count_replicas(plan)
    half = widths[plan.recipe.precision].compute
    width = FP32 if reduces_in_fp32(layout, plan.recipe) else half
    overlaps_with: OverlappedWith = "last_backward" if layout.overlap_grad_reduce else "nothing"
    dense, experts = stage.layers + stage.edges, stage.experts
    scaled = where(replicas.dense > 1, 2, 0)
    added = (dense + experts) * (plan.num_micro_batches * 2 + 1 + scaled) * width
    if not plan.architecture.num_moe_layers:
        groups = [(dense, replicas.dense, degrees.tp)]
    else:
        # Only with ep > 1 do experts have their own buffers and group. Its ranks are etp x ep apart
        # (parallel_state.py, "tp-cp-ep-dp-pp").
        apart = (degrees.ep > 1) & (experts > 0)
        groups = [
            (dense + where(apart, 0, experts), replicas.dense, degrees.tp),
            (where(apart, experts, 0), where(apart, replicas.experts, 1), layout.expert_tp * degrees.ep),
        ]
    transfers: list[Transfer] = []
    waits = layout.overlap_param_gather and (degrees.pp > 1) & (degrees.vpp == 1)
    for weights, ranks, stride in groups:
        buckets = count_buckets(plan, stage, weights)
        shards: bool = layout.distributed_optimizer
        how: Collective = "reduce_scatter" if shards else "all_reduce"
        # The last bucket to be reduced, or all of the last chunk. The first stage ends last: where another
        # one is the slowest, the step still ends with a reduction like this.
        exposed = where(degrees.vpp > 1, 1 / degrees.vpp, 1 / _count_first_buckets(plan, weights))
        transfers.append(
            Transfer("gradients", how, weights * width, ranks, stride, 1, buckets, overlaps_with, exposed)
        )
        if shards:
            meets: OverlappedWith = "first_forward" if layout.overlap_param_gather else "nothing"
            exposed = where(degrees.vpp > 1, 1 / degrees.vpp, 1 / buckets)
            gathered = Transfer(
                "gathers", "all_gather", weights * half, ranks, stride, 1, buckets, meets, exposed
            )
            transfers.append(gathered)
    tied = count_vocab_rows(plan, MAKE_VOCAB_SIZE_DIVISIBLE_BY * degrees.tp) * plan.architecture.hidden_size
    transfers += list_tied_reductions(plan, stage, tied * width)
    updated: float = dense + experts
    if layout.distributed_optimizer:
        updated = dense / replicas.dense + experts / replicas.experts
    return StateTraffic(
        tuple(transfers),
        copied_for_gradients=added,
        updated=updated,
        main_copies=half < FP32,
        first_micro_batch_waits=waits,
    )


def count_buckets(plan: Plan, stage: Stage, weights: int) -> int:
    """Return the buckets of a stage's gradient buffers: at least one for each model chunk.

    Only the first chunk of the first stage has several, if its reduction overlaps with backward: the others
    reduce while the pipeline drains (distributed_data_parallel.py, ``disable_bucketing or pp_rank > 0``).
    """
    degrees = plan.degrees
    first = _count_first_buckets(plan, ceil_div(weights, degrees.vpp)) + degrees.vpp - 1
    buckets: int = where(stage.is_first, first, degrees.vpp)
    return buckets


def _count_first_buckets(plan: Plan, weights: int) -> int:
    """Return the buckets of the first chunk of the first stage, with ``weights`` weights."""
    if not get_layout(plan).overlap_grad_reduce:
        return 1
    # Ranks of the group without context parallelism (process_groups_config.py, ``dp_group``).
    smallest = maximum(BUCKET_WEIGHTS, 1_000_000 * plan.degrees.data_parallel)
    buckets: int = maximum(1, ceil_div(weights, smallest))
    return buckets


def overlap(plan: Plan) -> Overlap:
    """Return which communication is overlapped with compute.

    Source: megatron/core/tensor_parallel/layers.py, Transformer Engine's user buffers, schedules.py.
    Megatron-LM overlaps sends between interleaved stages (``overlap_p2p_comm``), but waits for them while the
    pipeline fills and drains (``overlap_p2p_comm_warmup_flush`` is off): the chunks that the first stage runs
    before its first backward. Its checkpoint function recomputes the whole layer, without early stop.
    """
    layout, degrees = get_layout(plan), plan.degrees
    warm_up = 2 * (degrees.pp - 1) + (degrees.vpp - 1) * degrees.pp
    return Overlap(
        tensor_forward=layout.tp_comm_overlap,
        tensor_backward=True,
        gathers_input_again=not layout.tp_comm_overlap,
        context="ring",
        # One fused pass reads a partial output, and reads and writes the sum, 2 bytes each (Transformer
        # Engine, attention/dot_product_attention/context_parallel.py, flash_attn_fwd_out_correction; dq
        # likewise).
        merge_bytes=(6, 6),
        sends=degrees.vpp > 1,
        exposed_sends=minimum(1.0, warm_up / (plan.num_micro_batches * degrees.vpp)),
        spans_chunks=True,
        stops_early=False,
    )
