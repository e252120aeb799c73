"""DeepSpeed communication of one step, by ZeRO stage (Rajbhandari et al. 2020, section 7) and offload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.ops import ceil_div, maximum, minimum, where
from shardscope.core.precision import FP32, widths
from shardscope.frameworks.deepspeed.layout import check_not_quantized, get_layout, get_reduction_width
from shardscope.frameworks.deepspeed.memory.element_counts import (
    count_elements,
    count_expert_replicas,
    count_reduction_buckets,
)
from shardscope.frameworks.deepspeed.memory.offload_config import count_nvme_bytes
from shardscope.frameworks.deepspeed.memory.partition_parameters import FP64
from shardscope.memory.state.stages import count_vocab_rows
from shardscope.timing.parallel import list_tied_reductions
from shardscope.timing.traffic import Collective, Overlap, OverlappedWith, StateTraffic, Transfer

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.frameworks.deepspeed.memory.ipg_bucket import BucketCounts
    from shardscope.memory.state.stages import Stage

SCHEDULES = {"1f1b": "deepspeed.runtime.pipe.schedule.TrainSchedule"}
OVERLAP = Overlap()
"""Overlap of other collectives: none. AutoTP's reductions, expert all-to-alls and the pipeline's sends all
block (deepspeed/module_inject/layers.py, deepspeed/runtime/pipe/p2p.py)."""
OVERLAP_OF_STAGE_3 = OVERLAP._replace(kernels=(17, 26))
"""Stage 3 copies partitions into and out of buffers around each layer: kernels counted by torch's dispatcher
in rehearsals of a Llama layer with nine parameters. Stages 1 and 2 add none to a layer."""
_ADAM_BYTES = 7 * FP32
"""Bytes that DeepSpeedCPUAdam moves per weight: it reads weight, gradient and moments, and writes all but the
gradient."""


def state_traffic(plan: Plan, stage: Stage) -> StateTraffic:
    """Return the traffic of parameters and gradients per step, in bytes.

    Stages 0 to 2 all-reduce gradients, stages 1 and 2 all-gather updated parameters; stage 3 reduce-scatters
    gradients, and all-gathers parameters in each forward and, unless they were kept, in each backward.
    Reductions are overlapped with backward only with ``overlap_comm``, the default of stage 3; with a cast
    (``communication_data_type``) they send twice the bytes of half precision.
    """
    layout = get_layout(plan)
    check_not_quantized(layout)
    half = widths[plan.recipe.precision].compute
    groups = _list_parameter_groups(plan, stage)
    partitioned = sum((weights / replicas for weights, replicas, _ in groups), 0.0)
    owned: float = where(_partitions_update(plan), partitioned, stage.trainable)
    traffic = StateTraffic(
        (
            *_list_reductions(plan, stage, groups),
            # Before them, in the type in which autograd leaves it.
            *list_tied_reductions(plan, stage, count_vocab_rows(plan) * plan.architecture.hidden_size * half),
            *_list_all_gathers(plan, stage, groups),
        ),
        copied_for_gathers=_compute_gather_copies(plan, stage),
        copied_for_gradients=_compute_gradient_copies(plan, stage)
        + _compute_cast_bytes(plan, stage, owned)
        + owned * _count_preparation_bytes(plan),
        updated=owned,
        main_copies=half < FP32,
    )
    if plan.on_gpu:
        # On CPU ranks the host is the device: only NVMe is read and written.
        traffic = _add_host_traffic(plan, stage, traffic, owned)
    return _add_nvme_traffic(plan, stage, traffic)


def _partitions_update(plan: Plan) -> bool:
    """Return whether each rank updates its partition of the weights only.

    In a pipeline in bf16 stage 0 does, too (``BF16_Optimizer``, deepspeed/runtime/bf16_optimizer.py).
    """
    is_bf16 = plan.recipe.precision.startswith("bf16")
    return get_layout(plan).stage > 0 or (is_bf16 & (plan.degrees.pp > 1))


def _list_parameter_groups(plan: Plan, stage: Stage) -> list[tuple[int, int, int]]:
    """Return (trained weights of a rank, replicas, stride between their ranks) of each parameter group.

    With ep > 1 experts are a separate group (deepspeed/moe/utils.py), whose replicas are ep ranks apart
    (deepspeed/utils/groups.py, ``_create_expert_and_data_parallel``). Adapters do not belong to it.
    """
    ranks, ep, stride = plan.degrees.data_parallel, plan.degrees.ep, plan.degrees.tp
    if not plan.architecture.num_moe_layers or plan.recipe.has_adapters:
        return [(stage.trainable, ranks, stride)]
    is_separate = (ep > 1) & (stage.experts > 0)
    experts = where(is_separate, stage.experts, 0)
    return [
        (stage.trainable - experts, ranks, stride),
        (experts, where(is_separate, count_expert_replicas(ranks, ep), 1), stride * ep),
    ]


def _count_reductions(plan: Plan) -> int:
    """Return how often a step reduces gradients: below stage 2 at the accumulation boundary only."""
    return plan.num_micro_batches if get_layout(plan).stage >= 2 else 1


def _list_reductions(plan: Plan, stage: Stage, groups: list[tuple[int, int, int]]) -> list[Transfer]:
    """Return the reductions of gradients, bucket by bucket, of each parameter group."""
    layout = get_layout(plan)
    width, buckets = get_reduction_width(layout, plan.recipe), count_reduction_buckets(plan, stage)
    overlaps_with: OverlappedWith = "nothing"
    if _overlaps_reductions(plan):
        overlaps_with = "backward" if layout.stage >= 2 else "last_backward"
    # DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py: ``average_tensor`` all-reduces each bucket (without
    # ``use_multi_rank_bucket_allreduce`` it reduces one partition after another to its rank), and each rank
    # copies its partition out of it (``allreduce_and_scatter``).
    collective: Collective = "all_reduce" if layout.stage < 3 else "reduce_scatter"
    weights, replicas, stride = groups[0]
    reductions = [
        Transfer(
            "gradients",
            collective,
            weights * width,
            replicas,
            stride,
            _count_reductions(plan),
            maximum(1, buckets.number),
            overlaps_with,
            # Backward has ended when the last bucket is reduced.
            exposed_share=buckets.last / maximum(1, weights),
        )
    ]
    for weights, replicas, stride in groups[1:]:
        experts = reductions[0]._replace(num_bytes=weights * width, ranks=replicas, stride=stride)
        messages = maximum(1, ceil_div(weights, layout.reduce_bucket_size))
        reductions.append(experts._replace(num_messages=messages, exposed_share=None))
    # Gradients for NVMe are written to pinned memory by copies that the host waits for (``insert_tensor``,
    # runtime/swap_tensor/utils.py), so that backward of the last micro-batch waits for each reduction.
    if layout.offload_optimizer == "nvme" and plan.on_gpu and overlaps_with == "backward":
        last = [one._replace(times=1, overlaps_with="nothing") for one in reductions]
        reductions = [*(one._replace(times=one.times - 1) for one in reductions), *last]
    return reductions


def _overlaps_reductions(plan: Plan) -> bool:
    """Return whether reductions overlap with backward.

    They do not where stages 1 and 2 offload the optimizer, whatever ``overlap_comm`` is: for each gradient of
    its partition a rank waits on the host, until the bucket is reduced and the gradient before is copied
    (``update_offload_overflow_tracker``, ``_wait_for_offload_copies``, stage_1_and_2.py), and the other ranks
    wait for it at the next bucket.
    """
    layout = get_layout(plan)
    if layout.stage == 0 or (layout.stage < 3 and layout.offload_optimizer and plan.on_gpu):
        return False
    return layout.stage == 3 if layout.overlap_comm is None else layout.overlap_comm


def _list_all_gathers(plan: Plan, stage: Stage, groups: list[tuple[int, int, int]]) -> list[Transfer]:
    """Return the all-gathers of parameters: updated ones below stage 3, at each use in stage 3."""
    layout, half = get_layout(plan), widths[plan.recipe.precision].compute
    if layout.stage < 3:
        # One call for each group: ``all_gather_dp_groups`` (runtime/utils.py) ignores
        # ``allgather_bucket_size`` where torch has ``all_gather_into_tensor``.
        times = where(_partitions_update(plan), 1, 0)
        return [
            Transfer("gathers", "all_gather", weights * half, replicas, stride, times)
            for weights, replicas, stride in groups
        ]
    # One all-gather for each layer, and one for the tensors outside of layers. Backward finds parameters that
    # were not released after forward, because their next use is near (``stage3_max_reuse_distance``).
    in_forward, in_backward = count_elements(plan, stage).traffic.all_gathered
    forward = Transfer(
        "gathers",
        "all_gather",
        in_forward * half,
        plan.degrees.data_parallel,
        plan.degrees.tp,
        plan.num_micro_batches,
        stage.num_layers + 1,
        "forward",
    )
    # All-gathers of kept parameters do not start: backward has as many as its share of the elements. Without
    # any, one is repeated zero times. What was kept is used first, and the others are prefetched meanwhile:
    # no more is exposed than their share of a layer.
    backward = forward._replace(
        num_bytes=in_backward * half,
        times=where(in_backward > 0, plan.num_micro_batches, 0),
        num_messages=maximum(1, ceil_div(in_backward * (stage.num_layers + 1), maximum(1, in_forward))),
        overlaps_with="backward",
        exposed_share=1 / forward.num_messages,
    )
    if layout.zero_hpz_partition_size > 1:
        return _split_by_secondary_partitions(plan, forward, backward)
    return [forward, backward]


def _split_by_secondary_partitions(plan: Plan, forward: Transfer, backward: Transfer) -> list[Transfer]:
    """Return the all-gathers with secondary partitions (hpZ).

    A step's first forward all-gathers over all ranks, later ones over the small group. With adapters all use
    the small group: the base is frozen, and the adapters' size is negligible.
    """
    layout = get_layout(plan)
    num_over_all_ranks = 0 if plan.recipe.has_adapters else 1
    size = layout.zero_hpz_partition_size
    return [
        forward._replace(times=num_over_all_ranks),
        forward._replace(ranks=size, stride=1, times=plan.num_micro_batches - num_over_all_ranks),
        backward._replace(ranks=size, stride=1),
    ]


def _compute_cast_bytes(plan: Plan, stage: Stage, owned: float) -> float:
    """Return the bytes read and written by casts to the reduction type and back; 0 if there are none."""
    layout, half = get_layout(plan), widths[plan.recipe.precision].compute
    width = get_reduction_width(layout, plan.recipe)
    if width <= half:
        return 0
    # Stage 3 casts into the bucket, and casts only the reduced partition back (__avg_scatter_grads).
    cast_back = owned if layout.stage == 3 else stage.trainable
    return _count_reductions(plan) * (half + width) * (stage.trainable + cast_back)


def _compute_gather_copies(plan: Plan, stage: Stage) -> float:
    """Return the bytes that stage 3 reads and writes to copy parameters into flat buffers and out of them.

    A parameter that is all-gathered alone needs no copy (``all_gather_coalesced``, partition_parameters.py).
    """
    if get_layout(plan).stage < 3:
        return 0
    copied = sum(count_elements(plan, stage).traffic.copied_out)
    moved = 2 * widths[plan.recipe.precision].compute * copied
    return plan.num_micro_batches * moved * (1 + 1 / plan.degrees.data_parallel)


def _compute_gradient_copies(plan: Plan, stage: Stage) -> float:
    """Return the bytes read and written to accumulate gradients and to reduce them bucket by bucket.

    Source: ``allreduce_bucket`` and ``allreduce_and_copy`` of DeepSpeed 0.19.8 (runtime/engine.py), and
    runtime/zero/stage_1_and_2.py and stage3.py.
    """
    layout, half, micro_batches = (
        get_layout(plan),
        widths[plan.recipe.precision].compute,
        plan.num_micro_batches,
    )
    counts, trained = count_elements(plan, stage), stage.trainable
    copy, addition = 2 * half, 3 * half
    own, later = counts.own_gradients, micro_batches - 1
    # Each bucket is filled, divided by the number of ranks, and flattened in the order of ranks. Below stage
    # 3 gradients that are not in a bucket are copied back.
    reduced = (3 if layout.contiguous_gradients or layout.stage < 3 else 2) * copy * trained
    if layout.stage < 3:
        # A bucket of one partition is flat, and a single rank does not divide in stage 0.
        reduced = where(plan.degrees.data_parallel > 1, reduced, 2 * copy * trained)
    if layout.stage == 0:
        # BF16_Optimizer adds every micro-batch's gradients to its flat buffer (``_update_hp_grad``), and sets
        # them to zero before the next backward, where autograd adds to the zeros (``clear_lp_grads``).
        cleared = micro_batches * addition + later * half
        summed: float = where(_partitions_update(plan), cleared, 0) + later * addition
        return reduced + summed * trained
    # Offloaded gradients are not kept on the GPU, where each micro-batch's are added to those from the host.
    copied = 0 if layout.offload_optimizer else copy * own
    added = later * addition * own
    if layout.stage == 3:
        return micro_batches * reduced + copied + added
    # Slices of the own partition are copied back into the bucket, then its tensors out of it.
    copied = copied + copy * counts.partition
    if layout.stage == 1:
        # Autograd has added up the gradients of micro-batches.
        return reduced + copied + later * addition * trained
    return micro_batches * (reduced + copied) + added


def _count_preparation_bytes(plan: Plan) -> int:
    """Return the bytes read and written per updated weight between backward and the optimizer's kernel.

    ``compute_update_seconds`` already counts one read of an fp32 gradient for the norm, its scaling, and the
    write of the weight's cast.
    """
    layout, half = get_layout(plan), widths[plan.recipe.precision].compute
    # ``has_inf_or_nan`` reads a gradient twice; of stage 3, fp16 alone is searched.
    searched = 2 * half if half < FP32 and layout.stage < 3 else 0
    cast = half + FP32 if half < FP32 else 0
    # The updated main copy is read for its cast; fp32 weights have one, too.
    updated = FP32 if half < FP32 else 2 * FP32
    if layout.stage == 0:
        # The casts are flattened (``FP16_Optimizer.step``); fp32 has no wrapper.
        return searched + cast + 2 * FP32 + updated if half < FP32 else 0
    # Norms are computed in double precision.
    norm = half + 2 * FP64
    if layout.offload_optimizer:
        return searched + norm + cast
    return searched + norm - FP32 + 2 * half + cast + updated


def _add_host_traffic(plan: Plan, stage: Stage, traffic: StateTraffic, owned: float) -> StateTraffic:
    """Return ``traffic`` with gradients sent to the host, the update there, and weights sent back.

    ``owned`` is the number of weights that a rank updates.
    """
    layout, half, micro_batches = (
        get_layout(plan),
        widths[plan.recipe.precision].compute,
        plan.num_micro_batches,
    )
    if layout.offload_params:
        # Each use copies the rank's partitions to the GPU, where they are all-gathered.
        in_forward, in_backward = count_elements(plan, stage).traffic.all_gathered
        read = micro_batches * half / plan.degrees.data_parallel
        # Main copies on the GPU are copied in fp32, and cast on the host.
        returned = 0.0 if layout.offload_optimizer else FP32 * owned
        traffic = traffic._replace(
            fetched_forward=read * in_forward, fetched_backward=read * in_backward, returned_after=returned
        )
    if not layout.offload_optimizer:
        return traffic
    # On the host the gradient is scaled in place, and the updated weight is cast.
    host_passes = (2 * FP32 + FP32 + half) / _ADAM_BYTES
    traffic = traffic._replace(
        # Offloaded parameters stay on the host after the update.
        returned_after=0.0 if layout.offload_params else owned * half,
        updated=0.0,
        updated_on_host=(1 + host_passes) * owned,
    )
    # The last micro-batch's gradients, added up, are cast on the GPU and copied in fp32.
    if layout.stage < 3:
        buckets = count_reduction_buckets(plan, stage)
        return traffic._replace(returned_waiting=_compute_waiting_bytes(plan, stage, buckets))
    # Stage 3 copies each reduced partition to the host and back, on one stream (``partition_grads``).
    one_way, boundary = micro_batches * half * owned, FP32 * owned
    waits = layout.offload_optimizer == "nvme"
    return traffic._replace(
        fetched_backward=traffic.fetched_backward + one_way,
        returned_backward=2 * one_way + (0.0 if waits else boundary),
        returned_waiting=boundary if waits else 0.0,
    )


def _compute_waiting_bytes(plan: Plan, stage: Stage, buckets: BucketCounts) -> float:
    """Return the bytes of gradients that stages 1 and 2 copy to the host and back while all ranks wait.

    A bucket's gradients belong to few ranks, which copy them on the stream of backward; the others wait for
    these at the next bucket, so that the copies of all ranks come one after another
    (``copy_grads_in_partition``, stage_1_and_2.py; ``round_robin_gradients``, off by default, spreads them).
    From the second micro-batch on, stage 2 copies the sum so far to the GPU, adds to it there, and copies it
    back; each copy is of whole tensors.
    """
    half, micro_batches = widths[plan.recipe.precision].compute, plan.num_micro_batches
    experts = _count_waiting_experts(plan, stage)
    copied = FP32 * (buckets.owned + experts)
    if get_layout(plan).stage == 1:
        return copied
    several = where(micro_batches > 1, 2 * micro_batches - 1, 0)
    return copied + several * half * (buckets.overlapping + experts)


def _count_waiting_experts(plan: Plan, stage: Stage) -> int:
    """Return the routed experts of their own parameter group: their ranks, too, copy one after another."""
    is_separate = (plan.degrees.ep > 1) & (stage.experts > 0) & (not plan.recipe.has_adapters)
    return where(is_separate, stage.experts, 0)


def _add_nvme_traffic(plan: Plan, stage: Stage, traffic: StateTraffic) -> StateTraffic:
    """Return ``traffic`` with what NVMe reads and writes (Rajbhandari et al. 2021, section 5.2.2)."""
    layout, half = get_layout(plan), widths[plan.recipe.precision].compute
    if layout.offload_optimizer == "nvme":
        # Main copy, moments and gradients are read for the update, and all but the gradients written back.
        # Without ``pipeline_read`` and ``pipeline_write``, off by default, the update waits for both.
        files = count_nvme_bytes(plan, stage)
        # Writing the gradients overlaps with backward, except for the last buffer, which is as large as a
        # sub-group (``AsyncTensorSwapper``, runtime/swap_tensor/async_swapper.py).
        waiting = minimum(files.gradient_files, FP32 * count_elements(plan, stage).update_group)
        traffic = traffic._replace(
            nvme_overlapped=files.gradient_files - waiting,
            nvme_after=2 * files.optimizer_files + files.gradient_files + waiting,
        )
    if layout.offload_params == "nvme":
        # Sub-groups up to ``max_in_cpu`` and small partitions stay in host memory.
        moved = count_elements(plan, stage).traffic
        read = plan.num_micro_batches * half * sum(moved.read_from_nvme)
        traffic = traffic._replace(
            nvme_overlapped=traffic.nvme_overlapped + read,
            nvme_after=traffic.nvme_after + half * moved.written_to_nvme,
        )
    return traffic


def overlap(plan: Plan) -> Overlap:
    """Return which collectives of ``plan`` are overlapped with compute."""
    return OVERLAP_OF_STAGE_3 if get_layout(plan).stage == 3 else OVERLAP
