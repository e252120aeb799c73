"""ZeRO's element counts of one rank of a stage, from a simulation tensor by tensor.

Which tensors share a bucket, a partition or an all-gather cannot be computed with array arithmetic. Each
distinct combination of degrees is simulated once, and arrays of plans look its result up.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.ops import map_distinct, maximum
from shardscope.core.precision import widths
from shardscope.frameworks.deepspeed.communication import cast_elements
from shardscope.frameworks.deepspeed.memory.buckets import (
    Cut,
    Instant,
    Part,
    all_reduce_bucket,
    beyond,
    early,
    late,
    parts_of,
)
from shardscope.frameworks.deepspeed.memory.coordinator import Thresholds
from shardscope.frameworks.deepspeed.memory.gathers import gathered
from shardscope.frameworks.deepspeed.memory.route import Modules
from shardscope.frameworks.deepspeed.memory.swapping import SwapFailure, swaps_of
from shardscope.frameworks.deepspeed.memory.tensors import (
    FP64,
    Tensors,
    cut_each,
    largest_group,
    partition,
    tensors_on,
)
from shardscope.memory.state.stages import EMBEDDING_GROUPS, list_outer_tensors

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.memory.state.stages import Stage

_MATRICES = 3
"""Matrices of a gated feed-forward; with fewer matrices the last entry is repeated."""
_IN_FORWARD = 6
"""Number of all-gather points kept from forward: half are the last ones, with the most saved tensors, half
the largest ones."""


class Layer(NamedTuple):
    """Phases of one decoder layer's backward."""

    base: Instant
    """At its first gradient."""
    middle: Instant
    """Between the feed-forward's gradients and attention's."""
    peak: Instant
    """At its maximum."""
    inner: tuple[Instant, ...]
    """At the gradient of each feed-forward matrix; ``base`` if these are not simulated."""
    last: Instant
    """At the gradient of the last of these matrices."""
    following: Instant
    """At the first gradient of the next layer in backward, or of the embedding."""
    behind: Instant
    """At the maximum after the feed-forward, attention's first gradient included."""


class Counted(NamedTuple):
    """Element counts of one rank."""

    trained: int
    """Weights with gradients, routed experts included."""
    frozen: int
    """Frozen weights under adapters; in stage 3 this rank's partitions of them."""
    largest: int
    """Largest trained tensor."""
    tied: int
    """Embedding that is tied to the head: the head's gradient stays allocated through backward until the
    embedding's exists, and then both and their sum."""
    flat: int
    """Flat buffers of stages 1 and 2."""
    part: int
    """Weights that this rank updates."""
    kept: int
    """Gradients that this rank keeps: whole tensors in stages 1 and 2."""
    piece: int
    """Largest slice of a tensor in this rank's partition."""
    experts_piece: int
    """Largest slice of routed experts, if they are a separate parameter group."""
    group: int
    """Weights that are updated together: in stages 1 and 2 all, with separate experts; in stage 3 a
    sub-group."""
    widest: int
    """Largest tensor, frozen ones included."""
    rest: int
    """Persistent parameters of stage 3, which are never released."""
    forward: int
    """Elements that stage 3 has all-gathered at the end of forward."""
    in_forward: tuple[tuple[int, int], ...]
    """(layers passed, elements that stage 3 has all-gathered) at points of forward."""
    head: Layer
    """Backward of the head and the final norm."""
    layers: tuple[Layer, ...]
    """Backward of four layers: the first in backward order, the second, the last and the largest."""
    fullest_at: int
    """Number of layers that backward passes before the (first) largest one."""
    embedding: Instant
    """Maximum of the embedding's backward."""
    end: tuple[Instant, Instant]
    """Start and maximum of the final reduction."""


class _Kind(NamedTuple):
    """Properties that all plans of one array have in common."""

    arch: Architecture
    adapted: Recipe | None
    stage: int
    half: int
    overlaps: bool
    sub_group_size: int
    interval: int
    limits: Thresholds
    norm: int
    """See :class:`~shardscope.frameworks.deepspeed.memory.buckets.Cut`; for stages 1 and 2."""
    cast: int
    """See :class:`~shardscope.frameworks.deepspeed.memory.buckets.Cut`; for stages 0 to 2."""


def counted(plan: Plan, stage: Stage) -> Counted:
    """Return the element counts of one rank of ``stage``; for an array of plans each count is an array."""
    degrees = plan.degrees
    kind = _kind_of(plan.architecture, plan.recipe, plan.layout, plan.on_gpu)
    numbers = (
        degrees.tp,
        degrees.ep,
        stage.num_layers - stage.num_moe_layers,
        stage.num_moe_layers,
        stage.is_first,
        stage.is_last,
        degrees.data_parallel,
        plan.num_micro_batches > 1,
    )
    found: Counted = map_distinct(partial(_counted, kind), *numbers)
    return found


def swap_failure(arch: Architecture, recipe: Recipe, layout: Any, ranks: int) -> SwapFailure | None:
    """Return the assertion that DeepSpeed fails when it swaps parameters from NVMe; None if there is none."""
    kind = _kind_of(arch, recipe, layout, True)
    moe = arch.num_moe_layers
    return gathered(
        _modules(kind, arch.num_hidden_layers - moe, moe), ranks, kind.interval, kind.limits
    ).failure


def _kind_of(arch: Architecture, recipe: Recipe, layout: Any, on_gpu: bool) -> _Kind:
    half = widths[recipe.precision].compute
    moves = layout.offload_optimizer == "cpu"
    norm = FP64 // half if moves else 0
    cast = cast_elements(layout, recipe)
    return _Kind(
        arch,
        recipe if recipe.has_adapters else None,
        layout.stage,
        half,
        bool(layout.overlap_comm),
        layout.sub_group_size,
        recipe.recompute_interval if recipe.recompute in ("full", "selective") else 0,
        Thresholds(
            layout.stage3_param_persistence_threshold,
            layout.prefetched_elements,
            layout.stage3_max_live_parameters,
            layout.stage3_max_reuse_distance,
            layout.reduce_bucket_size,
            layout.contiguous_gradients,
            bool(layout.offload_params) and (on_gpu or layout.offload_params == "nvme"),
            swaps_of(layout, recipe),
            norm,
            moves and on_gpu,
            cast,
        ),
        norm,
        cast,
    )


@lru_cache(maxsize=4096)
def _counted(
    kind: _Kind,
    tp: int,
    ep: int,
    dense_layers: int,
    moe_layers: int,
    is_first: int,
    is_last: int,
    ranks: int,
    accumulates: int,
) -> Counted:
    tensors = tensors_on(kind.arch, kind.adapted, tp, ep, dense_layers, moe_layers, is_first, is_last)
    has_tied_head = kind.arch.tie_word_embeddings and is_first and is_last
    tied = tensors.trained[0] if has_tied_head and not kind.adapted else 0
    dense = partition(tensors.trained, ranks, kind.half, tensors.vectors)
    experts = partition(tensors.experts, expert_replicas(ranks, ep), kind.half)
    whole = tensors.trained.total + tensors.experts.total
    part, kept = dense.part + experts.part, dense.whole + experts.whole
    group, frozen = max(dense.part, experts.part), tensors.frozen.total
    rest = forward = 0
    in_forward: tuple[tuple[int, int], ...] = ((0, 0),)
    if kind.stage == 3:
        part = kept = cut_each(tensors.trained, ranks)
        frozen = cut_each(tensors.frozen, ranks)
        group = largest_group(tensors.trained, ranks, kind.sub_group_size, tensors.vectors)
        modules = _modules(kind, dense_layers, moe_layers)
        found = gathered(modules, ranks, kind.interval, kind.limits)
        rest, forward, in_forward, parts = found.rest, found.forward, found.in_forward, found.backward
    elif kind.stage == 0:
        flattened = max(
            all_reduce_bucket(sizes, cast=kind.cast) for sizes in (tensors.trained, tensors.experts)
        )
        parts = _late(tensors, tied, bool(accumulates), Instant(flattened, whole))
    else:
        bucket, drops = kind.limits.reduce_bucket, kind.stage > 1
        cut = Cut(dense.parts, dense.rank, dense.whole, bucket, drops, kind.norm, kind.cast)
        if drops or kind.overlaps:
            parts = early(
                tensors.trained,
                tensors.vectors,
                tensors.in_backward,
                _groups(tensors),
                cut,
                tied,
                tensors.num_attention,
                tensors.trained_wide,
                # Stage 1 reduces in the last micro-batch's backward alone.
                0 if drops or not accumulates else tensors.trained.total,
            )
        else:
            end = Instant(beyond(tensors.trained, tensors.vectors, cut), tensors.trained.total)
            parts = _late(tensors, tied, bool(accumulates), end)
        parts = _with_experts(parts, experts.whole)
    head, *layers, embedding, end_part = parts
    following = [*(layer.base for layer in layers[1:]), embedding.base]
    most = [layer.peak.total for layer in layers]
    fullest = most.index(max(most))
    told = [
        _layer(layers[place], following[place])
        for place in (0, min(1, len(layers) - 1), len(layers) - 1, fullest)
    ]
    return Counted(
        trained=whole,
        frozen=frozen,
        largest=max(tensors.trained.largest, tensors.experts.largest),
        tied=tied,
        flat=dense.flat + experts.flat,
        part=part,
        kept=kept,
        piece=dense.piece,
        experts_piece=experts.piece,
        group=group,
        widest=tensors.used.largest,
        rest=rest,
        forward=forward,
        in_forward=_most(in_forward),
        head=_layer(head, layers[0].base),
        layers=(told[0], told[1], told[2], told[3]),
        fullest_at=fullest,
        embedding=embedding.peak,
        end=(end_part.base, end_part.peak),
    )


def expert_replicas(ranks: Any, ep: Any) -> Any:
    """Return how many of the data-parallel ``ranks`` have the same experts."""
    return maximum(1, ranks // ep)


def is_late(stage: int, overlaps: bool, accumulates: Any) -> Any:
    """Return whether gradients stay whole until backward has ended, in stage 1 only.

    Without ``overlap_comm`` stage 1 reduces after backward; with it, only if micro-batches accumulate.
    """
    return stage == 1 and (accumulates if overlaps else True)


def _groups(tensors: Tensors) -> tuple[int, ...]:
    return parts_of(tensors.trained_before, tensors.trained_per_layer, len(tensors.trained))


def _late(tensors: Tensors, tied: int, accumulates: bool, end: Instant) -> tuple[Part, ...]:
    parts = late(
        tensors.trained,
        tensors.in_backward,
        _groups(tensors),
        tied,
        accumulates,
        tensors.num_attention,
        tensors.trained_wide,
    )
    return (*parts[:-1], Part(end, end))


def _with_experts(parts: tuple[Part, ...], experts: int) -> tuple[Part, ...]:
    """Add the kept gradients of experts that are a separate parameter group."""
    if not experts:
        return parts
    return tuple(Part(part.base, part.peak._replace(kept=part.peak.kept + experts)) for part in parts)


def _modules(kind: _Kind, dense_layers: int, moe_layers: int) -> Modules:
    outer = list_outer_tensors(kind.arch, 1, True, True)
    before, norm, head = (
        tuple(rows * columns for group, rows, columns in outer if group in groups)
        for groups in (EMBEDDING_GROUPS, ("norm",), ("lm_head",))
    )
    return Modules(kind.arch, kind.adapted, dense_layers, moe_layers, before, norm, head)


def _layer(part: Part, following: Instant) -> Layer:
    inner = part.inner[:_MATRICES] or (part.base,)
    return Layer(
        base=part.base,
        middle=part.middle or part.base,
        peak=part.peak,
        inner=(*inner, *inner[-1:] * (_MATRICES - len(inner))),
        last=part.inner[-1] if part.inner else part.peak,
        following=following,
        behind=part.behind,
    )


def _most(in_forward: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Keep the first and the last N/2 all-gather points, padded to N; they are ordered last to first."""
    half = _IN_FORWARD // 2
    found = (*in_forward[:half], *in_forward[half:][-half:])
    return (*found, *found[-1:] * (_IN_FORWARD - len(found)))
