"""DeepSpeed communication of one step, by ZeRO stage (Rajbhandari et al. 2020, section 7) and offload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.ops import ceil_div, maximum, where
from shardscope.core.precision import FP32, num_moments, widths
from shardscope.frameworks.deepspeed.layout import check_not_quantized, get_layout, get_reduction_width
from shardscope.frameworks.deepspeed.memory.training_state import count_expert_replicas
from shardscope.timing.traffic import Collective, Overlap, OverlappedWith, StateTraffic, Transfer

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage

SCHEDULES = {"1f1b": "deepspeed.runtime.pipe.schedule.TrainSchedule"}
OVERLAP = Overlap()
"""Overlap of other collectives: none. AutoTP's reductions, expert all-to-alls and the pipeline's sends all
block (deepspeed/module_inject/layers.py, deepspeed/runtime/pipe/p2p.py)."""


def state_traffic(plan: Plan, stage: Stage) -> StateTraffic:
    """Return the traffic of parameters and gradients per step, in bytes.

    Stage 0 all-reduces gradients, stages 1 and 2 reduce-scatter them and all-gather parameters, stage 3
    all-gathers parameters at every use. Reductions are overlapped with backward only with ``overlap_comm``,
    the default of stage 3; with a cast (``communication_data_type``) they send twice the bytes of half
    precision.
    """
    layout = get_layout(plan)
    check_not_quantized(layout)
    half, degrees = widths[plan.recipe.precision].compute, plan.degrees
    width = get_reduction_width(layout, plan.recipe)
    ranks, stride = degrees.data_parallel, degrees.tp
    micro_batches = plan.num_micro_batches
    gathered, reduced = stage.base * half, stage.trainable * half
    overlaps = layout.stage == 3 if layout.overlap_comm is None else layout.overlap_comm
    # Below stage 2 gradients are reduced at the gradient accumulation boundary, else in every micro-batch.
    times = micro_batches if layout.stage >= 2 else 1
    overlaps_with: OverlappedWith = "nothing"
    if overlaps and layout.stage > 0:
        overlaps_with = "backward" if layout.stage >= 2 else "last_backward"
    collective: Collective = "all_reduce" if layout.stage == 0 else "reduce_scatter"
    groups = _groups(plan, stage)
    transfers = [
        Transfer(
            "gradients",
            collective,
            weights * width,
            replicas,
            apart,
            times,
            maximum(1, ceil_div(weights, layout.reduce_bucket_size)),
            overlaps_with,
        )
        for weights, replicas, apart in groups
    ]
    if layout.stage in (1, 2):
        bucket = maximum(1, layout.allgather_bucket_size)
        transfers += [
            Transfer(
                "gathers",
                "all_gather",
                weights * half,
                replicas,
                apart,
                1,
                maximum(1, ceil_div(weights, bucket)),
            )
            for weights, replicas, apart in groups
        ]
    elif layout.stage == 3:
        gather = Transfer(
            "gathers", "all_gather", gathered, ranks, stride, micro_batches, stage.num_layers + 1, "forward"
        )
        transfers += [gather, gather._replace(overlaps_with="backward")]
        if layout.zero_hpz_partition_size > 1:
            transfers[-2:] = _from_near(plan, gather)
    owned: float = stage.trainable
    if layout.stage > 0:
        owned = sum((weights / replicas for weights, replicas, _ in groups), 0.0)
    cast: float = 0
    if width > half:
        # Stage 3 casts into the bucket and casts the reduced partition back; below it all is cast both ways.
        back = owned if layout.stage == 3 else stage.trainable
        cast = times * (half + width) * (stage.trainable + back)
    found = StateTraffic(
        tuple(transfers),
        # Copies into the bucket and, after accumulation, to fp32 (runtime/zero/stage_1_and_2.py, stage3.py).
        copied_for_gradients=micro_batches * (2 * reduced + owned * (half + 2 * FP32)) + cast,
        updated=owned,
        main_copies=half < FP32,
    )
    return _offloaded(plan, stage, found, owned, gathered / ranks) if plan.on_gpu else found


def _from_near(plan: Plan, gather: Transfer) -> list[Transfer]:
    """Return the all-gathers with second partitions (hpZ).

    A step's first forward all-gathers over all ranks, later ones over the small group. With adapters all use
    the small group: the base is frozen, and the adapters' size is negligible.
    """
    layout = get_layout(plan)
    far = 0 if plan.recipe.has_adapters else 1
    near = gather._replace(ranks=layout.zero_hpz_partition_size, stride=1)
    return [
        gather._replace(times=far),
        near._replace(times=plan.num_micro_batches - far),
        near._replace(overlaps_with="backward"),
    ]


def _groups(plan: Plan, stage: Stage) -> list[tuple[int, int, int]]:
    """Return (trained weights of a rank, replicas, stride between their ranks) of each parameter group.

    With ep > 1 experts are a separate group (deepspeed/moe/utils.py), whose replicas are ep ranks apart
    (deepspeed/utils/groups.py, ``_create_expert_and_data_parallel``). Adapters do not belong to it.
    """
    ranks, ep, stride = plan.degrees.data_parallel, plan.degrees.ep, plan.degrees.tp
    if not plan.architecture.num_moe_layers or plan.recipe.has_adapters:
        return [(stage.trainable, ranks, stride)]
    apart = (ep > 1) & (stage.experts > 0)
    experts = where(apart, stage.experts, 0)
    return [
        (stage.trainable - experts, ranks, stride),
        (experts, where(apart, count_expert_replicas(ranks, ep), 1), stride * ep),
    ]


def _offloaded(plan: Plan, stage: Stage, found: StateTraffic, owned: float, gathered: float) -> StateTraffic:
    """Return ``found`` with offload traffic: gradients to the host, the update there, weights back."""
    layout = get_layout(plan)
    half, micro_batches = widths[plan.recipe.precision].compute, plan.num_micro_batches
    if layout.offload_optimizer:
        leaving = micro_batches if layout.stage >= 2 else 1
        found = found._replace(
            returned_backward=leaving * owned * half,
            returned_after=0.0 if layout.offload_params else owned * half,
            updated=0.0,
            updated_on_host=owned,
        )
        if layout.offload_optimizer == "nvme":
            # Main copy and moments are read and written back (Rajbhandari et al. 2021, section 5.2.2).
            kept = FP32 * (1 + num_moments.get(plan.recipe.optimizer, 2))
            found = found._replace(nvme_after=2 * kept * owned)
    if layout.offload_params:
        each = micro_batches * gathered
        found = found._replace(fetched_forward=each, fetched_backward=each)
        if layout.offload_params == "nvme":
            found = found._replace(nvme_overlapped=2 * each, nvme_after=found.nvme_after + owned * half)
    return found


def overlap(plan: Plan) -> Overlap:
    """Return which collectives of ``plan`` are overlapped with compute."""
    return OVERLAP
