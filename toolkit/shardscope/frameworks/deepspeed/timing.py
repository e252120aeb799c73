"""DeepSpeed communication of one step, by ZeRO stage (Rajbhandari et al. 2020, section 7) and offload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.ops import ceil_div, maximum, where
from shardscope.core.precision import FP32, num_moments, widths
from shardscope.frameworks.deepspeed.layout import check_not_quantized, get_layout, get_reduction_width
from shardscope.frameworks.deepspeed.memory.training_state import count_elements, count_expert_replicas
from shardscope.memory.state.stages import count_vocab_rows
from shardscope.timing.parallel import list_tied_reductions
from shardscope.timing.traffic import Collective, Overlap, OverlappedWith, StateTraffic, Transfer

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage

SCHEDULES = {"1f1b": "deepspeed.runtime.pipe.schedule.TrainSchedule"}
OVERLAP = Overlap()
"""Overlap of other collectives: none. AutoTP's reductions, expert all-to-alls and the pipeline's sends all
block (deepspeed/module_inject/layers.py, deepspeed/runtime/pipe/p2p.py)."""
OVERLAP_OF_STAGE_3 = OVERLAP._replace(kernels=(17, 26))
"""Stage 3 copies partitions into and out of buffers around each layer: kernels counted by torch's dispatcher
in rehearsals of a Llama layer with nine parameters. Stages 1 and 2 add none to a layer."""


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
    owned: float = stage.trainable
    if layout.stage > 0:
        owned = sum((weights / replicas for weights, replicas, _ in groups), 0.0)
    # Copies into the bucket and, after accumulation, to fp32 (runtime/zero/stage_1_and_2.py, stage3.py).
    copied = plan.num_micro_batches * (2 * stage.trainable * half + owned * (half + 2 * FP32))
    traffic = StateTraffic(
        (
            *_list_reductions(plan, groups),
            # Before them, in the type in which autograd leaves it.
            *list_tied_reductions(plan, stage, count_vocab_rows(plan) * plan.architecture.hidden_size * half),
            *_list_all_gathers(plan, stage, groups),
        ),
        copied_for_gradients=copied + _compute_cast_bytes(plan, stage, owned),
        updated=owned,
        main_copies=half < FP32,
    )
    fetched = _compute_fetched_bytes(plan, stage) if layout.offload_params else (0.0, 0.0)
    if plan.on_gpu:
        # On CPU ranks the host is the device: only NVMe is read and written.
        traffic = _add_host_traffic(plan, traffic, owned, fetched)
    return _add_nvme_traffic(plan, traffic, owned, fetched)


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


def _list_reductions(plan: Plan, groups: list[tuple[int, int, int]]) -> list[Transfer]:
    """Return the reductions of gradients, bucket by bucket, of each parameter group."""
    layout = get_layout(plan)
    width = get_reduction_width(layout, plan.recipe)
    overlaps = layout.stage == 3 if layout.overlap_comm is None else layout.overlap_comm
    overlaps_with: OverlappedWith = "nothing"
    if overlaps and layout.stage > 0:
        overlaps_with = "backward" if layout.stage >= 2 else "last_backward"
    # DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py: ``average_tensor`` all-reduces each bucket (without
    # ``use_multi_rank_bucket_allreduce`` it reduces one partition after another to its rank), and each rank
    # copies its partition out of it (``allreduce_and_scatter``).
    collective: Collective = "all_reduce" if layout.stage < 3 else "reduce_scatter"
    return [
        Transfer(
            "gradients",
            collective,
            weights * width,
            replicas,
            stride,
            _count_reductions(plan),
            maximum(1, ceil_div(weights, layout.reduce_bucket_size)),
            overlaps_with,
        )
        for weights, replicas, stride in groups
    ]


def _list_all_gathers(plan: Plan, stage: Stage, groups: list[tuple[int, int, int]]) -> list[Transfer]:
    """Return the all-gathers of parameters: updated ones in stages 1 and 2, at each use in stage 3."""
    layout, half = get_layout(plan), widths[plan.recipe.precision].compute
    if layout.stage == 0:
        return []
    if layout.stage < 3:
        bucket = maximum(1, layout.allgather_bucket_size)
        return [
            Transfer(
                "gathers",
                "all_gather",
                weights * half,
                replicas,
                stride,
                1,
                maximum(1, ceil_div(weights, bucket)),
            )
            for weights, replicas, stride in groups
        ]
    # One all-gather for each layer, and one for the tensors outside of layers. Backward finds parameters that
    # were not released after forward, because their next use is near (``stage3_max_reuse_distance``).
    in_forward, in_backward = count_elements(plan, stage).all_gathered
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


def _compute_fetched_bytes(plan: Plan, stage: Stage) -> tuple[float, float]:
    """Return the bytes of a rank's partitions that all forwards and all backwards of a step all-gather."""
    in_forward, in_backward = count_elements(plan, stage).all_gathered
    read = plan.num_micro_batches * widths[plan.recipe.precision].compute / plan.degrees.data_parallel
    return read * in_forward, read * in_backward


def _add_host_traffic(
    plan: Plan, traffic: StateTraffic, owned: float, fetched: tuple[float, float]
) -> StateTraffic:
    """Return ``traffic`` with gradients sent to the host, the update there, and weights sent back.

    ``owned`` is the number of weights that a rank updates, ``fetched`` :func:`_compute_fetched_bytes`.
    """
    layout, half = get_layout(plan), widths[plan.recipe.precision].compute
    if layout.offload_optimizer:
        traffic = traffic._replace(
            returned_backward=_count_reductions(plan) * owned * half,
            # Offloaded parameters stay on the host after the update.
            returned_after=0.0 if layout.offload_params else owned * half,
            updated=0.0,
            updated_on_host=owned,
        )
    if layout.offload_params:
        # Each use copies the rank's partitions to the GPU, where they are all-gathered.
        traffic = traffic._replace(fetched_forward=fetched[0], fetched_backward=fetched[1])
    return traffic


def _add_nvme_traffic(
    plan: Plan, traffic: StateTraffic, owned: float, fetched: tuple[float, float]
) -> StateTraffic:
    """Return ``traffic`` with what NVMe reads and writes; arguments as for :func:`_add_host_traffic`."""
    layout = get_layout(plan)
    if layout.offload_optimizer == "nvme":
        # Main copy and moments are read and written back (Rajbhandari et al. 2021, section 5.2.2).
        state_width = FP32 * (1 + num_moments.get(plan.recipe.optimizer, 2))
        traffic = traffic._replace(nvme_after=2 * state_width * owned)
    if layout.offload_params == "nvme":
        written = owned * widths[plan.recipe.precision].compute
        traffic = traffic._replace(nvme_overlapped=sum(fetched), nvme_after=traffic.nvme_after + written)
    return traffic


def overlap(plan: Plan) -> Overlap:
    """Return which collectives of ``plan`` are overlapped with compute."""
    return OVERLAP_OF_STAGE_3 if get_layout(plan).stage == 3 else OVERLAP
