"""FSDP2 communication of one step: parameter all-gathers and gradient reduce-scatters of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.ops import ceil_div, group_equal, minimum, where
from shardscope.core.precision import get_base_width, widths
from shardscope.frameworks.fsdp2.layout import get_layout
from shardscope.frameworks.fsdp2.memory.quantized import count_base_shard
from shardscope.memory.state.stages import count_vocab_rows
from shardscope.timing.parallel import list_tied_reductions
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
# partial output to fp32 (2 + 4 bytes per element), subtracts, scales and subtracts again (12 + 8 + 12);
# backward adds a partial gradient to an fp32 sum (2 + 4 + 4). ``dkv_rotater`` sends fp32 gradients after
# every ring step, with one more exposed send after the last.
OVERLAP = Overlap(
    context="gather", merge_bytes=(38, 10), sends_gradients_home=True, sends=True, kernels=(20, 17)
)
"""Overlap of FSDP2's collectives: DTensor waits for each tensor-parallel collective, torch's context parallel
all-gathers keys and values (``_ContextParallelOptions.rotate_method``), torch.distributed.pipelining sends
asynchronously. Its own kernels of a layer are copies into and out of flat buffers, counted by torch's
dispatcher in rehearsals of a Llama layer with nine parameters."""
_ADDITION_SHARE = 3 / 7
"""Seconds of adding a gradient on the host, relative to updating a weight there, if memory bounds both:
an addition reads two numbers and writes one, AdamW reads four and writes three."""


def state_traffic(plan: Plan, stage: Stage) -> StateTraffic:
    """Return the traffic of parameters and gradients per step, in bytes (Zhao et al. 2023).

    Every micro-batch has all-gathers and reduce-scatters; HSDP's all-reduce runs once a step.
    ``reshard_after_forward`` decides the all-gather in backward: none (False), over all sharding ranks
    (True), or over the given number of ranks. Prefetching overlaps the next layer's all-gather with this
    layer's compute. All-gathered parameters are copied out of one flat buffer, gradients into one
    (``_fsdp_collectives.py``). A pipeline stage keeps its parameters all-gathered after a backward, and
    reduces its gradients when the schedule has ended (memory/pipeline_buffers.py).

    Every rank sends a shard of the fullest rank's size: ``padded_sharded_param_size`` (``_fsdp_param.py``)
    in all-gathers, ``_get_dim0_padded_size`` in reduce-scatters. With more ranks than experts these are
    several times the experts' weights. A base in NF4 is all-gathered as it is stored.

    With offload, a reduced shard is cast to the type of the originals and copied to the host, overlapped with
    backward. Where the host has a gradient already, the copy blocks: the next layer's backward is launched
    after the reduction, the copy and the addition on the host (``foreach_reduce``, torch 2.13,
    ``_fsdp_collectives.py``: ``non_blocking`` unless ``to_accumulate_grad``).
    """
    layout = get_layout(plan)
    degrees, width = plan.degrees, widths[plan.recipe.precision]
    ranks, stride = group_equal(degrees.shard * degrees.cp), degrees.tp
    # One collective for each layer, and one for the rest of the stage.
    calls = stage.num_layers + 1
    # The elements and bytes of the buffers that memory/groups.py has layer by layer.
    base, trained = ranks * count_base_shard(plan, stage, ranks), ranks * stage.trainable_shard
    adapters = trained if plan.recipe.has_adapters else 0
    gathered, reduced = (base + adapters) * width.compute, trained * width.reduce

    # How often a step all-gathers and reduces. In a pipeline stage, each forward before the first backward
    # all-gathers what the one before has resharded (1F1B has at most pp of them); from then on the stage
    # keeps its parameters.
    has_stages, micro_batches, reshard = degrees.pp > 1, plan.num_micro_batches, layout.reshard_after_forward
    forwards_of_stage = minimum(micro_batches, degrees.pp) if reshard else 1
    forwards = where(has_stages, forwards_of_stage, micro_batches)
    backwards = where(has_stages, 1, micro_batches) if reshard else 0
    reductions = where(has_stages, 1, micro_batches)

    # Gradients that are added up on the host: backward waits for their reduction and for their copies. HSDP
    # adds its reduced shards up on the GPU until it all-reduces them.
    offloads = layout.offload == "cpu" and plan.on_gpu
    waiting = where(degrees.replicate > 1, 0, reductions - 1) if offloads else 0

    # The root's parameters stay from forward to backward, and so through a pipeline's schedule: fully_shard
    # does not reshard the root by default. Their mean in one of the forwards:
    root = ranks * stage.edge_shard
    root_in_forward = root / where(has_stages, forwards, 1)

    # The collectives.
    in_forward = gathered - (root - root_in_forward) * width.compute
    gather = Transfer("gathers", "all_gather", in_forward, ranks, stride, forwards, calls, "forward")
    reduction = Transfer(
        "gradients", "reduce_scatter", reduced, ranks, stride, reductions - waiting, calls, "backward"
    )
    transfers = [gather, reduction]
    if offloads:
        transfers.append(reduction._replace(times=waiting, overlaps_with="nothing"))
    if reshard:
        resharded_ranks = ranks if reshard is True else int(reshard)
        in_layers = gathered - root * width.compute
        again = gather._replace(num_bytes=in_layers, ranks=resharded_ranks, times=backwards)
        transfers.append(again._replace(num_messages=stage.num_layers, overlaps_with="backward"))
    replicas = Transfer(
        "gradients",
        "all_reduce",
        reduced / ranks,
        degrees.replicate,
        stride * ranks,
        1,
        calls,
        "last_backward",
    )
    transfers.append(replicas)
    # Each rank reduces its shard of a tied embedding's gradient.
    tied = ceil_div(count_vocab_rows(plan), ranks) * plan.architecture.hidden_size * width.original
    transfers += list_tied_reductions(plan, stage, tied)

    # Copying out reads and writes each element. With one rank there is no buffer: the parameters are cast.
    base_width = get_base_width(plan.recipe)

    def count_copied(stored_width: int) -> int:
        return where(ranks == 1, stored_width, width.compute) + width.compute

    copied = (base - root) * count_copied(base_width) + adapters * count_copied(width.original)
    copied_root = root_in_forward * count_copied(base_width)
    # Each micro-batch's gradients are copied, or added up in a pipeline; the padding is written once for each
    # reduce-scatter.
    padding = reduced - stage.trainable * width.reduce
    traffic = StateTraffic(
        tuple(transfers),
        copied_for_gathers=forwards * (copied + copied_root) + backwards * copied,
        copied_for_gradients=micro_batches * stage.trainable * (width.compute + width.reduce)
        + reductions * padding,
        updated=stage.trainable_shard,
    )
    if not offloads:
        return traffic
    # Offloaded shards are copied to the GPU for each all-gather, and their gradients back, in the type of the
    # originals; the host updates.
    fetched = ((base - root) * base_width + adapters * width.original) / ranks
    fetched_root = root_in_forward * base_width / ranks
    returned = stage.trainable_shard * width.original
    return traffic._replace(
        fetched_forward=forwards * (fetched + fetched_root),
        fetched_backward=backwards * fetched,
        returned_backward=where(degrees.replicate > 1, 1, reductions - waiting) * returned,
        returned_waiting=waiting * returned,
        updated=0.0,
        updated_on_host=(1 + waiting * _ADDITION_SHARE) * stage.trainable_shard,
    )


def overlap(plan: Plan) -> Overlap:
    """Return which collectives of ``plan`` are overlapped with compute."""
    return OVERLAP
