"""What FSDP2 sends in one step: each layer gathered for forward and backward, its gradients scattered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.core.arrays.arithmetic import by_value, smallest, where
from shardscope.core.precision import base_width, widths
from shardscope.timing.traffic import Overlap, StateTraffic, Transfer

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage

SCHEDULES = {
    "gpipe": "torch.distributed.pipelining.ScheduleGPipe",
    "1f1b": "torch.distributed.pipelining.Schedule1F1B",
    "interleaved": "torch.distributed.pipelining.ScheduleInterleaved1F1B",
}
# torch.distributed.tensor.experimental, _context_parallel/_attention.py (torch 2.13). ``_SDPAMerger`` casts a
# part's output to fp32 (2 + 4 bytes), subtracts, scales and subtracts again (12 + 8 + 12); backward adds a
# part's gradient to an fp32 sum (2 + 4 + 4). ``dkv_rotater`` sends fp32 after every part, and is waited for
# once more behind the last.
OVERLAP = Overlap(context="gather", merges=(38, 10), gradients_home=True, sends=True)
"""DTensor waits for each collective of tp; torch's context parallel gathers keys and values
(``_ContextParallelOptions.rotate_method``); torch.distributed.pipelining does not wait for what it sends."""


def state_traffic(plan: Plan, stage: Stage) -> StateTraffic:
    """All-gathers and reduce-scatters of every micro-batch; HSDP's all-reduce once (Zhao et al. 2023).

    ``reshard_after_forward`` decides the second gather: none (False), over all ranks (True), or over the few
    that it resharded to. Prefetching lets the next layer's run beneath this layer's arithmetic. Gathered
    parameters are copied out of one buffer, gradients into one (``_fsdp_collectives.py``). A pipeline stage
    keeps parameters once it has gone backward, and reduces when its schedule has ended (memory/pipeline.py).
    """
    layout: Any = plan.layout
    degrees, width = plan.degrees, widths[plan.recipe.precision]
    ranks, stride, calls = by_value(degrees.shard * degrees.cp), degrees.tp, stage.num_layers + 1
    gathered, reduced = stage.base * width.compute, stage.trainable * width.reduce
    micro_batches, reshard = plan.num_micro_batches, layout.reshard_after_forward
    staged = degrees.pp > 1
    forwards = where(staged, smallest(micro_batches, degrees.pp), micro_batches)
    backwards = where(staged, 1, micro_batches) if reshard else 0
    gather = Transfer("gathers", "all_gather", gathered, ranks, stride, forwards, calls, "forward")
    reductions = where(staged, 1, micro_batches)
    transfers = [
        gather,
        Transfer("gradients", "reduce_scatter", reduced, ranks, stride, reductions, calls, "backward"),
    ]
    if reshard:
        few = ranks if reshard is True else int(reshard)
        transfers.append(gather._replace(ranks=few, times=backwards, beneath="backward"))
    copies = Transfer(
        "gradients",
        "all_reduce",
        reduced / ranks,
        degrees.replicate,
        stride * ranks,
        1,
        calls,
        "last_backward",
    )
    transfers.append(copies)
    alone = ranks == 1
    gathers = forwards + backwards
    # Copied out: read and written. A lone rank casts instead.
    copied = gathers * stage.base * where(alone, base_width(plan.recipe) + width.compute, 2 * width.compute)
    staging = micro_batches * stage.trainable * (width.compute + width.reduce)
    if layout.offload is None or not plan.on_gpu:
        return StateTraffic(
            tuple(transfers),
            copied_for_gathers=copied,
            copied_for_gradients=staging,
            updated=stage.trainable_shard,
        )
    down = stage.base / ranks * base_width(plan.recipe)
    return StateTraffic(
        tuple(transfers),
        copied_for_gathers=copied,
        copied_for_gradients=staging,
        fetched_forward=forwards * down,
        fetched_backward=backwards * down,
        returned_backward=reductions * stage.trainable / ranks * width.reduce,
        updated_on_host=stage.trainable / ranks,
    )


def overlap(plan: Plan) -> Overlap:
    """What runs beneath arithmetic."""
    return OVERLAP
