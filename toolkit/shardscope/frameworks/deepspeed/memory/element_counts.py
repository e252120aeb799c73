"""Element counts of one rank under ZeRO, from which its training state and its traffic are computed.

Which tensors share a bucket, a partition or an all-gather cannot be computed with array arithmetic. Each
distinct combination of degrees is simulated once, tensor by tensor, and arrays of plans look its result up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.number_format import format_gib
from shardscope.core.ops import map_distinct, maximum, where
from shardscope.core.precision import FP32, widths
from shardscope.frameworks.deepspeed.layout import get_cast_width, get_layout
from shardscope.frameworks.deepspeed.memory.fp16_optimizer import (
    ALL_REDUCE_ELEMENTS,
    count_all_reduce_copy,
)
from shardscope.frameworks.deepspeed.memory.ipg_bucket import (
    BucketCounts,
    ReductionOptions,
    count_buckets,
    place_gradients,
)
from shardscope.frameworks.deepspeed.memory.late_reduction import (
    count_late_reduction,
    keep_gradients,
    list_kept_parts,
)
from shardscope.frameworks.deepspeed.memory.parameter_offload import build_traced_model
from shardscope.frameworks.deepspeed.memory.partition_parameters import (
    FP64,
    RankTensors,
    find_largest_sub_group,
    list_tensors,
    sum_partitions,
)
from shardscope.frameworks.deepspeed.memory.partitioned_param_coordinator import (
    Stage3Options,
    find_first_failure,
)
from shardscope.frameworks.deepspeed.memory.partitioned_param_swapper import SwapFailure, get_nvme_options
from shardscope.frameworks.deepspeed.memory.phases import (
    BackwardPart,
    BackwardPhases,
    PhaseElements,
    choose_phases,
)
from shardscope.frameworks.deepspeed.memory.zero_optimizer_stage3 import (
    Stage3Traffic,
    simulate_step,
)
from shardscope.frameworks.deepspeed.memory.zero_optimizer_stage_1_and_2 import (
    FlatPartition,
    is_contiguous,
    partition_flat_buffers,
    reduce_in_backward,
)
from shardscope.memory.activations.modules.attention import find_window_layers
from shardscope.memory.report import Term
from shardscope.memory.state.lora import Adapters, find_adapters
from shardscope.memory.state.stages import (
    Stage,
)

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.frameworks.deepspeed.layout import ZeroLayout


_NUM_IN_FORWARD = 6
"""Number of all-gather points kept from forward: half are the last ones, with the most saved tensors, half
the largest ones."""


class ElementCounts(NamedTuple):
    """Element counts of one rank."""

    trained: int
    """Weights with gradients, routed experts included."""
    frozen: int
    """Frozen weights under adapters; in stage 3 this rank's partitions of them."""
    largest_trained: int
    """Largest trained tensor."""
    tied_head: int
    """Embedding that is tied to the head: the head's gradient stays allocated through backward until the
    embedding's exists, and then both and their sum."""
    flat_buffers: int
    """Flat buffers of stages 1 and 2."""
    partition: int
    """Weights that this rank updates."""
    own_gradients: int
    """Gradients that this rank keeps: in stages 1 and 2 those of all tensors that overlap its partition."""
    largest_slice: int
    """Largest slice of a tensor in this rank's partition of the flat buffers."""
    largest_expert_slice: int
    """Largest slice of routed experts, if they are a separate parameter group."""
    update_group: int
    """Weights that are updated together: in stages 1 and 2 all, with separate experts; in stage 3 a
    sub-group."""
    largest_tensor: int
    """Largest tensor, frozen ones included."""
    persistent: int
    """Persistent parameters of stage 3, which are never released."""
    after_forward: int
    """Elements that stage 3 has all-gathered at the end of forward."""
    gathered_in_forward: tuple[tuple[int, int], ...]
    """(layers passed, elements that stage 3 has all-gathered) at points of forward."""
    traffic: Stage3Traffic
    """Elements that a micro-batch of stage 3 moves."""
    backward: BackwardPhases
    final_reduction: tuple[PhaseElements, PhaseElements]
    """Start and maximum of the final reduction."""


class RankCounts(NamedTuple):
    """Element counts of one rank, with the sizes that turn them into bytes in all ZeRO stages."""

    counts: ElementCounts
    half: int
    """Bytes of a weight in the compute type, and of its gradient."""
    ranks: int
    accumulates: bool
    """Whether a step has several micro-batches."""
    trains_all: bool
    group_sizes: tuple[int, ...]
    """Number of ranks of each communicator."""

    @property
    def frozen_bytes(self) -> int:
        """Bytes of frozen weights under adapters, which have no optimizer state."""
        return self.half * self.counts.frozen

    def add_frozen(self, num_bytes: int, explain: Callable[[], str]) -> Term:
        """Return the term of the trained weights' bytes with the frozen weights added."""
        frozen = self.frozen_bytes
        return Term(
            num_bytes + frozen, lambda: explain() + (f" + {format_gib(frozen)} GiB frozen" if frozen else "")
        )

    @staticmethod
    def format_width(num_bytes: int, num_elements: int) -> str:
        """Return the bytes per element as text; not always an integer, since 8-bit moments have scales."""
        return f"{num_bytes / max(1, num_elements):.4g}"


def count_rank(plan: Plan, stage: Stage) -> RankCounts:
    """Return the element counts of one rank of ``stage`` and the sizes of its elements."""
    return RankCounts(
        counts=count_elements(plan, stage),
        half=widths[plan.recipe.precision].compute,
        ranks=plan.degrees.data_parallel,
        accumulates=plan.num_micro_batches > 1,
        trains_all=not plan.recipe.has_adapters,
        group_sizes=_list_group_sizes(plan),
    )


def _list_group_sizes(plan: Plan) -> tuple[int, ...]:
    """Return the number of ranks of each communicator.

    Adjacent pipeline stages have one communicator per pair (torch's ``ProcessGroupNCCL``;
    deepspeed/runtime/pipe/p2p.py).
    """
    degrees = plan.degrees
    stage_pairs = (where(degrees.pp > 1, 2, 1), where(degrees.pp > 2, 2, 1))
    return (degrees.data_parallel, degrees.tp, *stage_pairs, degrees.ep)


def count_elements(plan: Plan, stage: Stage) -> ElementCounts:
    """Return the element counts of one rank of ``stage``; for an array of plans each count is an array."""
    return map_distinct(
        partial(_count_elements, _get_plan_settings(plan)),
        *_list_rank_numbers(plan, stage),
        plan.num_micro_batches > 1,
    )


def count_reduction_buckets(plan: Plan, stage: Stage) -> BucketCounts:
    """Return the buckets in which one rank's gradients are reduced; experts of a separate group are excluded.

    For an array of plans each count is an array.
    """
    return map_distinct(
        partial(_count_reduction_buckets, _get_plan_settings(plan)), *_list_rank_numbers(plan, stage)
    )


def _list_rank_numbers(plan: Plan, stage: Stage) -> tuple[int, int, int, int, int, int, int]:
    """Return the numbers that a rank's tensors, and their partitions, follow from."""
    degrees = plan.degrees
    return (
        degrees.tp,
        degrees.ep,
        stage.num_layers - stage.num_moe_layers,
        stage.num_moe_layers,
        stage.is_first,
        stage.is_last,
        degrees.data_parallel,
    )


def find_swap_failure(
    arch: Architecture, recipe: Recipe, layout: ZeroLayout, ranks: int
) -> SwapFailure | None:
    """Return the assertion that DeepSpeed fails when it swaps parameters from NVMe; None if there is none."""
    settings = _get_settings(arch, recipe, layout, on_gpu=True)
    moe_layers = arch.num_moe_layers
    model = build_traced_model(arch, settings.adapters, arch.num_hidden_layers - moe_layers, moe_layers)
    return find_first_failure(model, ranks, settings.recompute_interval, settings.options)


def count_expert_replicas(ranks: int, ep: int) -> int:
    """Return how many of the data-parallel ``ranks`` have the same experts."""
    return maximum(1, ranks // ep)


class _Settings(NamedTuple):
    """Properties that all plans of one array have in common."""

    arch: Architecture
    adapters: Adapters | None
    stage: int
    half: int
    overlaps: bool
    is_contiguous: bool
    sub_group_size: int
    recompute_interval: int
    options: Stage3Options


def _get_plan_settings(plan: Plan) -> _Settings:
    return _get_settings(plan.architecture, plan.recipe, get_layout(plan), on_gpu=plan.on_gpu)


def _get_settings(arch: Architecture, recipe: Recipe, layout: ZeroLayout, *, on_gpu: bool) -> _Settings:
    half = widths[recipe.precision].compute
    offloads_gradients = layout.offload_optimizer == "cpu"
    swaps = "nvme" in (layout.offload_params, layout.offload_optimizer)
    # Only stage 3 gathers weights again for recomputation. For other stages the settings do not name it, so
    # that their counts are found once for all recomputation.
    recomputes_layers = layout.stage == 3 and recipe.recompute in ("full", "selective")
    return _Settings(
        arch,
        find_adapters(arch, recipe),
        layout.stage,
        half,
        bool(layout.overlap_comm),
        is_contiguous(layout),
        layout.sub_group_size,
        recipe.recompute_interval if recomputes_layers else 0,
        Stage3Options(
            param_persistence_threshold=layout.stage3_param_persistence_threshold,
            prefetch_bucket_size=layout.prefetched_elements,
            max_live_parameters=layout.stage3_max_live_parameters,
            max_reuse_distance=layout.stage3_max_reuse_distance,
            reduce_bucket_size=layout.reduce_bucket_size,
            contiguous_gradients=layout.contiguous_gradients,
            offloads_partitions=bool(layout.offload_params) and (on_gpu or layout.offload_params == "nvme"),
            nvme=get_nvme_options(layout, recipe) if swaps else None,
            norm_width=FP64 // half if offloads_gradients else 0,
            reads_gradients_back=offloads_gradients and on_gpu,
            main_copy_width=FP32 // half if offloads_gradients and half < FP32 else 0,
            cast_width=get_cast_width(layout, recipe),
        ),
    )


@lru_cache(maxsize=4096)
def _count_elements(
    settings: _Settings,
    tp: int,
    ep: int,
    dense_layers: int,
    moe_layers: int,
    is_first: int,
    is_last: int,
    ranks: int,
    accumulates: int,
) -> ElementCounts:
    """Return the element counts of one rank for one combination of plain numbers."""
    arch, adapters = settings.arch, settings.adapters
    tensors = list_tensors(arch, adapters, tp, ep, dense_layers, moe_layers, is_first, is_last)
    has_tied_head = arch.tie_word_embeddings and is_first and is_last
    # Under adapters the tied embedding is frozen, and has no gradient.
    tied_head = tensors.trained[0] if has_tied_head and not adapters else 0
    frozen = tensors.frozen.total
    flat_buffers = largest_slice = largest_expert_slice = persistent = after_forward = 0
    in_forward: tuple[tuple[int, int], ...] = ((0, 0),)
    traffic = Stage3Traffic()
    full_attention = _find_full_attention(arch, dense_layers + moe_layers)
    if settings.stage == 3:
        # Every tensor is partitioned by itself, and sub-groups of them are updated together.
        partition = own_gradients = sum_partitions(tensors.trained, ranks)
        frozen = sum_partitions(tensors.frozen, ranks)
        update_group = find_largest_sub_group(
            tensors.trained, ranks, settings.sub_group_size, tensors.is_vector
        )
        model = build_traced_model(arch, adapters, dense_layers, moe_layers)
        step = simulate_step(model, ranks, settings.recompute_interval, settings.options)
        persistent, after_forward, in_forward = step.persistent, step.after_forward, step.in_forward
        traffic = step.traffic
        *parts, reduction = step.backward
        backward = choose_phases(parts, full_attention)
    else:
        # Flat buffers are partitioned; experts that expert parallelism shards have one of their own.
        dense = partition_flat_buffers(tensors.trained, ranks, settings.half, tensors.is_vector)
        expert_ranks = count_expert_replicas(ranks, ep)
        experts = partition_flat_buffers(tensors.experts, expert_ranks, settings.half)
        partition = dense.elements + experts.elements
        own_gradients = dense.overlapping + experts.overlapping
        update_group = max(dense.elements, experts.elements)
        flat_buffers = dense.flat_buffers + experts.flat_buffers
        largest_slice, largest_expert_slice = dense.largest_slice, experts.largest_slice
        options = _build_reduction_options(settings, dense)
        backward, reduction = _count_backward(
            settings, tensors, options, experts.overlapping, tied_head, bool(accumulates), full_attention
        )
    return ElementCounts(
        trained=tensors.trained.total + tensors.experts.total,
        frozen=frozen,
        largest_trained=max(tensors.trained.largest, tensors.experts.largest),
        tied_head=tied_head,
        flat_buffers=flat_buffers,
        partition=partition,
        own_gradients=own_gradients,
        largest_slice=largest_slice,
        largest_expert_slice=largest_expert_slice,
        update_group=update_group,
        largest_tensor=tensors.used.largest,
        persistent=persistent,
        after_forward=after_forward,
        gathered_in_forward=_choose_in_forward(in_forward),
        traffic=traffic,
        backward=backward,
        final_reduction=(reduction.first_gradient, reduction.peak),
    )


def _find_full_attention(arch: Architecture, num_layers: int) -> int | None:
    """Return the layer, in backward order, that is the first without a sliding window in forward order.

    None if all layers of the model are the same.
    """
    if not 0 < arch.sliding_window_layers < arch.num_hidden_layers:
        return None
    windows = find_window_layers(arch.num_hidden_layers, arch.sliding_window_layers)[:num_layers]
    return num_layers - 1 - (windows.index(False) if False in windows else 0)


def _build_reduction_options(settings: _Settings, dense: FlatPartition) -> ReductionOptions:
    options = settings.options
    return ReductionOptions(
        dense.sizes,
        dense.rank,
        dense.overlapping,
        options.reduce_bucket_size if settings.stage else ALL_REDUCE_ELEMENTS,
        partitions_gradients=settings.stage == 2,
        norm_width=options.norm_width,
        cast_width=options.cast_width,
        is_contiguous=settings.is_contiguous,
        frees_late=settings.overlaps and not settings.is_contiguous,
    )


@lru_cache(maxsize=4096)
def _count_reduction_buckets(
    settings: _Settings,
    tp: int,
    ep: int,
    dense_layers: int,
    moe_layers: int,
    is_first: int,
    is_last: int,
    ranks: int,
) -> BucketCounts:
    """Return the buckets of one rank for one combination of plain numbers."""
    arch, adapters = settings.arch, settings.adapters
    if settings.stage == 3:
        model = build_traced_model(arch, adapters, dense_layers, moe_layers)
        return simulate_step(model, ranks, settings.recompute_interval, settings.options).buckets
    # In the order of backward, or group by group after it, matrices first.
    tensors = list_tensors(arch, adapters, tp, ep, dense_layers, moe_layers, is_first, is_last)
    dense = partition_flat_buffers(tensors.trained, ranks, settings.half, tensors.is_vector)
    options = _build_reduction_options(settings, dense)
    gradients = place_gradients(tensors.trained, tensors.is_vector, options.partitions)
    if settings.stage == 2 or settings.overlaps:
        gradients = tuple(gradients[index] for index in tensors.gradient_order)
    elif any(tensors.is_vector):
        by_group = sorted(range(len(gradients)), key=tensors.is_vector.__getitem__)
        gradients = tuple(gradients[index] for index in by_group)
    return count_buckets(gradients, options.bucket_size, finds_busiest=options.norm_width > 0)


def _count_backward(
    settings: _Settings,
    tensors: RankTensors,
    reduction_options: ReductionOptions,
    expert_gradients: int,
    tied_head: int,
    accumulates: bool,
    full_attention: int | None,
) -> tuple[BackwardPhases, BackwardPart]:
    """Return the phases of backward in stages 0 to 2, and the final reduction.

    ``expert_gradients``: elements of routed experts' gradients in their own group that the rank keeps.
    """
    if settings.stage == 0:
        # All gradients stay, and are flattened group by group for the all-reduce after backward.
        flattened = max(
            count_all_reduce_copy(sizes, cast_width=reduction_options.cast_width)
            for sizes in (tensors.trained, tensors.experts)
        )
        last = PhaseElements(flattened, tensors.trained.total + tensors.experts.total)
        return keep_gradients(tensors, tied_head, accumulates, full_attention), BackwardPart(last, last)
    if settings.stage == 2 or settings.overlaps:
        # Stage 1 reduces in the last micro-batch's backward alone.
        keeps_earlier = settings.stage == 1 and accumulates
        earlier_gradients = tensors.trained.total if keeps_earlier else 0
        *parts, reduction = reduce_in_backward(tensors, reduction_options, tied_head, earlier_gradients)
        if expert_gradients:
            parts = [_add_expert_gradients(part, expert_gradients) for part in parts]
            reduction = _add_expert_gradients(reduction, expert_gradients)
        return choose_phases(parts, full_attention), reduction
    late = count_late_reduction(tensors.trained, tensors.is_vector, reduction_options)
    last = PhaseElements(late, tensors.trained.total)
    reduction = BackwardPart(last, last)
    if not expert_gradients:
        return keep_gradients(tensors, tied_head, accumulates, full_attention), reduction
    parts = [
        _add_expert_gradients(part, expert_gradients)
        for part in list_kept_parts(tensors, tied_head, accumulates, full_attention)
    ]
    return choose_phases(parts, full_attention), _add_expert_gradients(reduction, expert_gradients)


def _add_expert_gradients(part: BackwardPart, elements: int) -> BackwardPart:
    """Return a part in which gradients of experts, a separate parameter group, are kept as well."""
    return BackwardPart(part.first_gradient, part.peak._replace(gradients=part.peak.gradients + elements))


def _choose_in_forward(points: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Keep the first and the last N/2 all-gather points, padded to N; they are ordered last to first."""
    half = _NUM_IN_FORWARD // 2
    chosen = (*points[:half], *points[half:][-half:])
    return (*chosen, *chosen[-1:] * (_NUM_IN_FORWARD - len(chosen)))
