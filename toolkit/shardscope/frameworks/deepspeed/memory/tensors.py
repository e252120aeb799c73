"""Tensors of one rank in model order, as DeepSpeed flattens and partitions them.

ZeRO's padding, the gradients that a rank keeps and the persistent parameters depend on the sizes of single
tensors, so totals are not enough.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from shardscope.core.ops import ceil_div, maximum
from shardscope.core.precision import FP32, widths
from shardscope.families.parameter_names import names_of
from shardscope.families.registry import family_of
from shardscope.frameworks.deepspeed.memory.calls import around
from shardscope.memory.state.lora import find_adapter_targets, find_first_layer
from shardscope.memory.state.stages import EMBEDDING_GROUPS, list_outer_tensors, list_rank_shapes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.memory.state.stages import RankShape, Stage

_Number = TypeVar("_Number", bound=int)

FP64 = 8
"""Gradient norms accumulate in double precision (``get_norm_dtype``, deepspeed/runtime/zero/utils.py)."""


class Many(tuple[_Number, ...]):
    """Tuple with cached hash, sum and maximum: it is used as a cache key many times."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def total(self) -> int:
        """Sum of the numbers."""
        return sum(self)

    @cached_property
    def largest(self) -> int:
        """Maximum of the numbers; 0 if empty."""
        return max(self, default=0)


class Tensors(NamedTuple):
    """Elements of every tensor on one rank, in the model's order."""

    trained: Many[int]
    """Tensors with gradients; with expert parallelism, without routed experts."""
    experts: Many[int]
    """Routed experts with gradients, if expert parallelism puts them into a separate parameter group."""
    frozen: Many[int]
    """Frozen tensors under adapters."""
    used: Many[int]
    """All tensors, in the order of their use in forward."""
    num_before: int
    """Number of tensors of ``used`` before the first decoder layer."""
    per_layer: tuple[int, ...]
    """Number of tensors of ``used`` in each decoder layer."""
    trained_before: int
    """Number of tensors of ``trained`` before the first decoder layer."""
    trained_per_layer: tuple[int, ...]
    """Number of tensors of ``trained`` in each decoder layer."""
    num_attention: int
    """Number of a decoder layer's tensors that forward has used at the end of attention."""
    trained_wide: Many[bool] = Many()
    """Flags of ``trained``: a feed-forward's large matrices; empty with adapters."""
    vectors: Many[bool] = Many()
    """Flags of ``trained``: vectors, which have no weight decay and so a separate flat buffer."""
    in_backward: Many[int] = Many()
    """Indices into ``trained``, in the order of their gradients."""


def cuts_tied_head(arch: Architecture) -> bool:
    """Return whether AutoTP shards an embedding that is tied to the head; else it is replicated.

    Source: ``VocabParallelEmbedding.validate_embedding`` (deepspeed/module_inject/layers.py). If it fails the
    engine keeps both replicated (``_apply_autotp_partitioning``, deepspeed/runtime/engine.py).
    """
    return arch.tie_word_embeddings and not family_of(arch).has_own_embedding_class


def tensors_of(plan: Plan, stage: Stage) -> Tensors:
    """Return the tensors of one rank of ``stage``."""
    recipe, degrees, moe = plan.recipe, plan.degrees, stage.num_moe_layers
    adapted = recipe if recipe.has_adapters else None
    ends = int(stage.is_first), int(stage.is_last)
    return tensors_on(plan.architecture, adapted, degrees.tp, degrees.ep, stage.num_layers - moe, moe, *ends)


@lru_cache(maxsize=1024)
def tensors_on(
    arch: Architecture,
    adapted: Recipe | None,
    tp: int,
    ep: int,
    dense_layers: int,
    moe_layers: int,
    is_first: int,
    is_last: int,
) -> Tensors:
    """Return the tensors of one rank of a stage, given its layers; ``adapted`` is a recipe with adapters."""
    # AutoTP shards an embedding only if it is tied to the head.
    first = list_outer_tensors(arch, tp if cuts_tied_head(arch) else 1, is_first, is_last)
    last = list_outer_tensors(arch, tp, is_first, is_last)
    before = tuple((rows, columns) for group, rows, columns in first if group in EMBEDDING_GROUPS and rows)
    after = tuple((rows, columns) for group, rows, columns in last if group not in EMBEDDING_GROUPS)
    return _tensors(arch, adapted, tp, ep, dense_layers, moe_layers, before, after)


def fullest_rank(plan: Plan) -> int:
    """Return the rank with the most kept gradients, for a plan without pipeline stages."""
    from shardscope.memory.state.stages import count_stage_weights, find_stage_shapes

    if plan.layout.stage not in (1, 2):  # type: ignore[attr-defined]
        return 0
    tensors = tensors_of(
        plan, count_stage_weights(plan, find_stage_shapes(plan.architecture, plan.stage_layers).kinds[0])
    )
    half = widths[plan.recipe.precision].compute
    return partition(tensors.trained, plan.degrees.data_parallel, half, tensors.vectors).rank


@lru_cache(maxsize=512)
def _tensors(
    arch: Architecture,
    adapted: Recipe | None,
    tp: int,
    ep: int,
    dense_layers: int,
    moe_layers: int,
    outer_before: tuple[tuple[int, int], ...],
    outer_after: tuple[tuple[int, int], ...],
) -> Tensors:
    before, after = (tuple(rows * columns for rows, columns in part) for part in (outer_before, outer_after))
    trained: list[int] = []
    experts: list[int] = []
    frozen: list[int] = []
    used: list[int] = list(before)
    per_layer: list[int] = []
    trained_per_layer: list[int] = []
    wide = [False] * len(before)
    vectors = [columns == 1 for _, columns in outer_before]
    (frozen if adapted else trained).extend(before)
    met = list(range(len(trained)))
    # Dense layers come first (DeepSeek's first_k_dense_replace); if kinds alternate, the sizes are the same.
    for moe, count in ((False, dense_layers), (True, moe_layers)):
        if not count:
            continue
        layer, layer_experts, layer_frozen, layer_used = _layer(arch, adapted, moe, tp, ep)
        order = range(len(layer)) if adapted else _in_forward(arch, moe, tp, ep)
        met.extend(len(trained) + repeat * len(layer) + place for repeat in range(count) for place in order)
        trained.extend(layer * count)
        wide.extend(_wide(arch, moe, tp, ep) * count)
        vectors.extend(_vectors(arch, moe, tp, ep) * count)
        experts.extend(layer_experts * count)
        frozen.extend(layer_frozen * count)
        used.extend(layer_used * count)
        per_layer.extend([len(layer_used)] * count)
        trained_per_layer.extend([len(layer)] * count)
    used.extend(after)
    (frozen if adapted else trained).extend(after)
    met.extend(range(len(met), len(trained)))
    return Tensors(
        Many(trained),
        Many(experts),
        Many(frozen),
        Many(used),
        len(before),
        tuple(per_layer),
        0 if adapted else len(before),
        tuple(trained_per_layer),
        _num_attention(arch, adapted is not None),
        Many(() if adapted else (*wide, *(False for _ in after))),
        Many(() if adapted else (*vectors, *(columns == 1 for _, columns in outer_after))),
        Many(reversed(met)),
    )


def _num_attention(arch: Architecture, adapted: bool) -> int:
    """Return the number of attention's tensors; without adapters, plus those of the norms before it."""
    prefix = f"{names_of(arch).attention}."
    names = [name for _, name, _ in arch.layer_shapes(0)]
    before, _, _ = around(arch, _norms(arch, names))
    return sum(name.startswith(prefix) for name in names) + (not adapted) * sum(map(len, before))


def _norms(arch: Architecture, names: Iterable[str]) -> list[list[int]]:
    """Return the indices into ``names`` of each norm outside of attention and feed-forward."""
    halves = (f"{names_of(arch).attention}.", "mlp.")
    found: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        if not name.startswith(halves):
            found.setdefault(name.rpartition(".")[0], []).append(place)
    return list(found.values())


def _in_forward(arch: Architecture, moe: bool, tp: int, ep: int) -> list[int]:
    """Return the indices of a decoder layer's tensors, all trained, in forward order; norms register last."""
    names = [
        shape.name
        for shape in list_rank_shapes(arch, moe, tp, ep)
        if not (ep > 1 and shape.group == "experts")
    ]
    inside = [place for place, name in enumerate(names) if name.startswith("mlp.")]
    before, middle, behind = around(arch, _norms(arch, names))
    first, second, third = ([place for norm in norms for place in norm] for norms in (before, middle, behind))
    others = {*first, *second, *third, *inside}
    attention = [place for place in range(len(names)) if place not in others]
    return [*first, *attention, *second, *inside, *third]


def _wide(arch: Architecture, moe: bool, tp: int, ep: int) -> tuple[bool, ...]:
    """Return which tensors of a decoder layer, all trained, are a feed-forward's large matrices."""
    names = names_of(arch)
    routers = (names.router, f"{names.shared_experts}_gate")
    return tuple(
        shape.name.startswith("mlp.") and shape.columns > 1 and shape.name.rpartition(".")[0] not in routers
        for shape in list_rank_shapes(arch, moe, tp, ep)
        if not (ep > 1 and shape.group == "experts")
    )


def _vectors(arch: Architecture, moe: bool, tp: int, ep: int) -> tuple[bool, ...]:
    """Return which tensors of a decoder layer, all trained, are vectors."""
    return tuple(
        shape.copies == shape.columns == 1
        for shape in list_rank_shapes(arch, moe, tp, ep)
        if not (ep > 1 and shape.group == "experts")
    )


@lru_cache(maxsize=512)
def _layer(
    arch: Architecture, adapted: Recipe | None, moe: bool, tp: int, ep: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return trained, expert and frozen tensors of a decoder layer, and all of them in the order of use."""
    shapes = list_rank_shapes(arch, moe, tp, ep)
    sizes = [(shape.group, shape.copies * shape.rows * shape.columns) for shape in shapes]
    used = tuple(size for _, size in sizes)
    if adapted is None:
        split = ep > 1
        trained = tuple(size for group, size in sizes if not (split and group == "experts"))
        experts = _expert_by_expert([shape for shape in shapes if split and shape.group == "experts"])
        return trained, experts, (), used
    rank, targets = adapted.adapter_rank, find_adapter_targets(arch, adapted)
    adapters: list[int] = []
    for target, (out, inner) in arch.layer_linears(find_first_layer(arch, moe)):
        if target in targets:
            adapters += [rank * inner, rank * out]
    return tuple(ceil_div(size, tp) for size in adapters), (), used, (*used, *adapters)


def _expert_by_expert(stacked: list[RankShape]) -> tuple[int, ...]:
    """Return the tensors of DeepSpeed's experts, each of which is a module (deepspeed/moe/experts.py)."""
    copies = stacked[0].copies if stacked else 0
    return tuple(shape.rows * shape.columns for _ in range(copies) for shape in stacked)


class Partition(NamedTuple):
    """Equal partitions of the flat buffers in stages 1 and 2, on the rank with the most memory."""

    flat: int
    """Elements of the buffers, each padded to twice the ranks (``nccl_start_alignment_factor``)."""
    parts: tuple[int, int]
    """Elements of one rank's partition of each buffer: of matrices, and of vectors."""
    whole: int
    """Elements of all tensors that overlap the rank's partitions: their gradients are kept whole."""
    piece: int
    """Elements of the largest slice of a tensor in the partitions."""
    rank: int
    """Rank with the most memory at the start of the optimizer step."""

    @property
    def part(self) -> int:
        """Elements of one rank's partitions."""
        return sum(self.parts)


@lru_cache(maxsize=4096)
def partition(sizes: tuple[int, ...], num_ranks: int, half: int, vectors: tuple[bool, ...] = ()) -> Partition:
    """Partition ``DeepSpeedZeroOptimizer``'s flat buffers over ``sizes``.

    Each parameter group has one buffer: matrices, with weight decay, and ``vectors``, without.
    ``copy_grads_in_partition`` keeps the whole gradients of all tensors that overlap a partition
    (deepspeed/runtime/zero/stage_1_and_2.py), and the norm of each slice is in double precision, so ranks
    differ. ``half`` is the size of a gradient in bytes.
    """
    touched, pieces = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    parts: list[int] = []
    for group in by_decay(sizes, vectors):
        parts.append(ceil_div(sum(group), 2 * num_ranks) * 2)
        if group:
            _follow(np.array(group, np.int64), parts[-1], touched, pieces)
    part = sum(parts)
    rank = int(np.argmax(half * touched + working(half, part, pieces)))
    return Partition(part * num_ranks, (parts[0], parts[1]), int(touched[rank]), int(pieces[rank]), rank)


def _follow(
    group: NDArray[np.int64], part: int, touched: NDArray[np.int64], pieces: NDArray[np.int64]
) -> None:
    """Add the overlapping tensors of each rank's partition to ``touched``, and update its largest slice."""
    ends = np.cumsum(group)
    starts = ends - group
    first, last = starts // part, (ends - 1) // part
    # Elements of tensors that start to overlap at a rank, minus those that no longer do.
    change, inside = np.zeros((2, len(touched) + 1), np.int64)
    np.add.at(change, first, group)
    np.subtract.at(change, last + 1, group)
    touched += np.cumsum(change)[:-1]
    np.maximum.at(pieces, first, np.minimum(ends, (first + 1) * part) - starts)
    np.maximum.at(pieces, last, ends - np.maximum(starts, last * part))
    # Between the first and the last rank of a tensor, whole partitions belong to it.
    is_long = last > first
    np.add.at(inside, first[is_long] + 1, 1)
    np.subtract.at(inside, last[is_long], 1)
    np.maximum(pieces, (np.cumsum(inside)[:-1] > 0) * part, out=pieces)


def working(half: int, part: Any, piece: Any) -> Any:
    """Return the bytes besides kept gradients: a slice in fp64 for its norm, or the flat partition in both
    types."""
    return maximum(FP64 * piece, (FP32 + (half if half < FP32 else 0)) * part)


@lru_cache(maxsize=4096)
def cut_each(sizes: tuple[int, ...], num_ranks: int) -> int:
    """Return the elements on one rank of stage 3: every tensor is partitioned, rounded up."""
    return sum(ceil_div(size, num_ranks) for size in sizes)


@lru_cache(maxsize=4096)
def largest_group(
    sizes: tuple[int, ...], num_ranks: int, sub_group_size: int, vectors: tuple[bool, ...] = ()
) -> int:
    """Return the elements of one rank's partitions of stage 3's largest sub-group."""
    groups = sub_groups(sizes, num_ranks, sub_group_size, vectors)
    return max(cut_each(tuple(group), num_ranks) for group in groups)


def sub_groups(
    sizes: tuple[int, ...], num_ranks: int, sub_group_size: int, vectors: tuple[bool, ...] = ()
) -> list[list[int]]:
    """Return stage 3's sub-groups, the tensors that are updated together, as unpartitioned sizes.

    A sub-group ends with the tensor whose partition fills it (``_create_fp16_sub_groups``); matrices come
    first, and ``vectors`` are in separate sub-groups.
    """
    found: list[list[int]] = []
    for group in filter(None, by_decay(sizes, vectors)):
        found.append([])
        filled = 0
        for size in group:
            if filled >= sub_group_size:
                found.append([])
                filled = 0
            found[-1].append(size)
            filled += ceil_div(size, num_ranks)
    return found


def by_decay(sizes: tuple[int, ...], vectors: tuple[bool, ...]) -> tuple[list[int], list[int]]:
    """Return the optimizer's parameter groups: matrices, and ``vectors``, without weight decay."""
    marks = vectors or (False,) * len(sizes)
    matrices = [size for size, is_vector in zip(sizes, marks, strict=True) if not is_vector]
    return matrices, [size for size, is_vector in zip(sizes, marks, strict=True) if is_vector]
