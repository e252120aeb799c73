"""The tensors of one rank in the order in which the model lists them, as DeepSpeed flattens and cuts them.

ZeRO's padding, the gradients that a partition really keeps and the parameters that are never cut all depend
on single tensors, so counts are not enough here.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from shardscope.core.arrays.arithmetic import ceil_div, largest
from shardscope.core.precision import FP32, widths
from shardscope.families.parameter_names import names_of
from shardscope.families.registry import family_of
from shardscope.frameworks.deepspeed.memory.calls import around
from shardscope.memory.state.lora import adapter_targets, first_layer
from shardscope.memory.state.stages import INPUTS, outer_tensors, rank_shapes

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
    """Numbers that are asked about again and again: their hash, sum and largest are found once."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def total(self) -> int:
        """Their sum."""
        return sum(self)

    @cached_property
    def largest(self) -> int:
        """The largest of them; 0 of none."""
        return max(self, default=0)


class Tensors(NamedTuple):
    """Elements of every tensor on one rank, in the model's order."""

    trained: Many[int]
    """Tensors that get gradients, routed experts excluded."""
    experts: Many[int]
    """Routed experts that get gradients, where expert parallelism keeps them in a group of their own."""
    frozen: Many[int]
    """Tensors under adapters."""
    used: Many[int]
    """All of them, in the order in which forward needs them."""
    num_before: int
    """Tensors of ``used`` before the first decoder layer."""
    per_layer: tuple[int, ...]
    """Tensors of ``used`` in each decoder layer."""
    trained_before: int
    """Tensors of ``trained`` before the first decoder layer."""
    trained_per_layer: tuple[int, ...]
    """Tensors of ``trained`` in each decoder layer."""
    num_attention: int
    """Tensors of each decoder layer that forward has met when attention ends."""
    trained_wide: Many[bool] = Many()
    """Which of ``trained`` are a feed-forward's large matrices; empty under adapters."""
    vectors: Many[bool] = Many()
    """Which of ``trained`` are vectors, which do not decay and so have flat buffers of their own."""
    in_backward: Many[int] = Many()
    """Places in ``trained``, in the order in which their gradients come."""


def cuts_tied_head(arch: Architecture) -> bool:
    """Whether AutoTP cuts an embedding that is the head too; else every rank has all of it.

    ``VocabParallelEmbedding.validate_embedding`` (deepspeed/module_inject/layers.py), upon whose refusal the
    engine keeps both replicated (``_apply_autotp_partitioning``, deepspeed/runtime/engine.py).
    """
    return arch.tie_word_embeddings and not family_of(arch).has_own_embedding_class


def tensors_of(plan: Plan, stage: Stage) -> Tensors:
    """Every tensor of one rank of ``stage``."""
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
    """The same, of a stage of so many layers; ``adapted`` is the recipe if it has adapters."""
    # AutoTP cuts an embedding only where it is the head too.
    first = outer_tensors(arch, tp if cuts_tied_head(arch) else 1, is_first, is_last)
    last = outer_tensors(arch, tp, is_first, is_last)
    before = tuple((rows, columns) for group, rows, columns in first if group in INPUTS and rows)
    after = tuple((rows, columns) for group, rows, columns in last if group not in INPUTS)
    return _tensors(arch, adapted, tp, ep, dense_layers, moe_layers, before, after)


def fullest_rank(plan: Plan) -> int:
    """The rank of a plan without pipeline stages that keeps most gradients."""
    from shardscope.memory.state.stages import shapes_of, stage_of

    if plan.layout.stage not in (1, 2):  # type: ignore[attr-defined]
        return 0
    tensors = tensors_of(plan, stage_of(plan, shapes_of(plan.architecture, plan.stage_layers).kinds[0]))
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
    # Dense layers come first (DeepSeek's first_k_dense_replace); where kinds alternate, sizes are the same.
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
    """Its own, and where all weights are trained those of the norms before it."""
    prefix = f"{names_of(arch).attention}."
    names = [name for _, name, _ in arch.layer_shapes(0)]
    before, _, _ = around(arch, _norms(arch, names))
    return sum(name.startswith(prefix) for name in names) + (not adapted) * sum(map(len, before))


def _norms(arch: Architecture, names: Iterable[str]) -> list[list[int]]:
    """Places of each norm's tensors among ``names`` of a layer, of those that are in none of its halves."""
    halves = (f"{names_of(arch).attention}.", "mlp.")
    found: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        if not name.startswith(halves):
            found.setdefault(name.rpartition(".")[0], []).append(place)
    return list(found.values())


def _in_forward(arch: Architecture, moe: bool, tp: int, ep: int) -> list[int]:
    """Places of a decoder layer's tensors, all trained, as forward meets them: norms are registered last."""
    names = [
        shape.name for shape in rank_shapes(arch, moe, tp, ep) if not (ep > 1 and shape.group == "experts")
    ]
    inside = [place for place, name in enumerate(names) if name.startswith("mlp.")]
    before, middle, behind = around(arch, _norms(arch, names))
    first, second, third = ([place for norm in norms for place in norm] for norms in (before, middle, behind))
    others = {*first, *second, *third, *inside}
    attention = [place for place in range(len(names)) if place not in others]
    return [*first, *attention, *second, *inside, *third]


def _wide(arch: Architecture, moe: bool, tp: int, ep: int) -> tuple[bool, ...]:
    """Which tensors of one decoder layer, all trained, are a feed-forward's large matrices."""
    names = names_of(arch)
    routers = (names.router, f"{names.shared_experts}_gate")
    return tuple(
        shape.name.startswith("mlp.") and shape.columns > 1 and shape.name.rpartition(".")[0] not in routers
        for shape in rank_shapes(arch, moe, tp, ep)
        if not (ep > 1 and shape.group == "experts")
    )


def _vectors(arch: Architecture, moe: bool, tp: int, ep: int) -> tuple[bool, ...]:
    """Which tensors of one decoder layer, all trained, are vectors."""
    return tuple(
        shape.copies == shape.columns == 1
        for shape in rank_shapes(arch, moe, tp, ep)
        if not (ep > 1 and shape.group == "experts")
    )


@lru_cache(maxsize=512)
def _layer(
    arch: Architecture, adapted: Recipe | None, moe: bool, tp: int, ep: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Trained, expert and frozen tensors of one decoder layer, and all in the order of use."""
    shapes = rank_shapes(arch, moe, tp, ep)
    sizes = [(shape.group, shape.copies * shape.rows * shape.columns) for shape in shapes]
    used = tuple(size for _, size in sizes)
    if adapted is None:
        split = ep > 1
        trained = tuple(size for group, size in sizes if not (split and group == "experts"))
        experts = _expert_by_expert([shape for shape in shapes if split and shape.group == "experts"])
        return trained, experts, (), used
    rank, targets = adapted.adapter_rank, adapter_targets(arch, adapted)
    adapters: list[int] = []
    for target, (out, inner) in arch.layer_linears(first_layer(arch, moe)):
        if target in targets:
            adapters += [rank * inner, rank * out]
    return tuple(ceil_div(size, tp) for size in adapters), (), used, (*used, *adapters)


def _expert_by_expert(stacked: list[RankShape]) -> tuple[int, ...]:
    """Tensors of DeepSpeed's own experts, each of which is a module (deepspeed/moe/experts.py)."""
    copies = stacked[0].copies if stacked else 0
    return tuple(shape.rows * shape.columns for _ in range(copies) for shape in stacked)


class Partition(NamedTuple):
    """Stages 1 and 2: flat buffers, each cut into equal parts; of the fullest rank where ranks differ."""

    flat: int
    """Elements, each buffer padded to twice the ranks (``nccl_start_alignment_factor``)."""
    parts: tuple[int, int]
    """Elements of one rank's part of each buffer: of matrices, and of vectors."""
    whole: int
    """Elements of all tensors that the rank's parts touch: their gradients are kept whole."""
    piece: int
    """Elements of the largest piece of a tensor in the parts."""
    rank: int
    """The rank that holds most when the optimizer begins."""

    @property
    def part(self) -> int:
        """Elements of one rank's parts."""
        return sum(self.parts)


@lru_cache(maxsize=4096)
def partition(sizes: tuple[int, ...], num_ranks: int, half: int, vectors: tuple[bool, ...] = ()) -> Partition:
    """``DeepSpeedZeroOptimizer``'s flat buffers over ``sizes`` and what each rank's parts touch.

    A group of parameters that decays alike has one buffer: matrices one, and ``vectors`` another.
    ``copy_grads_in_partition`` keeps whole gradients of all tensors that a partition touches
    (deepspeed/runtime/zero/stage_1_and_2.py), and the norm takes each piece in double precision, so ranks
    differ. ``half`` is the bytes of a gradient.
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
    """Add what each rank's ``part`` of one buffer touches; note its largest piece."""
    ends = np.cumsum(group)
    starts = ends - group
    first, last = starts // part, (ends - 1) // part
    # What begins to be touched at a rank, less what no longer is.
    change, inside = np.zeros((2, len(touched) + 1), np.int64)
    np.add.at(change, first, group)
    np.subtract.at(change, last + 1, group)
    touched += np.cumsum(change)[:-1]
    np.maximum.at(pieces, first, np.minimum(ends, (first + 1) * part) - starts)
    np.maximum.at(pieces, last, ends - np.maximum(starts, last * part))
    # Between the first and the last rank of a tensor all of a part is its.
    is_long = last > first
    np.add.at(inside, first[is_long] + 1, 1)
    np.subtract.at(inside, last[is_long], 1)
    np.maximum(pieces, (np.cumsum(inside)[:-1] > 0) * part, out=pieces)


def working(half: int, part: Any, piece: Any) -> Any:
    """Bytes beside kept gradients: a piece in fp64 for its norm, or the part flat, and flat in fp32."""
    return largest(FP64 * piece, (FP32 + (half if half < FP32 else 0)) * part)


@lru_cache(maxsize=4096)
def cut_each(sizes: tuple[int, ...], num_ranks: int) -> int:
    """Elements that one rank of stage 3 keeps: every tensor is cut, and its parts rounded up."""
    return sum(ceil_div(size, num_ranks) for size in sizes)


@lru_cache(maxsize=4096)
def largest_group(
    sizes: tuple[int, ...], num_ranks: int, sub_group_size: int, vectors: tuple[bool, ...] = ()
) -> int:
    """Elements of this rank's parts of stage 3's largest sub-group."""
    groups = sub_groups(sizes, num_ranks, sub_group_size, vectors)
    return max(cut_each(tuple(group), num_ranks) for group in groups)


def sub_groups(
    sizes: tuple[int, ...], num_ranks: int, sub_group_size: int, vectors: tuple[bool, ...] = ()
) -> list[list[int]]:
    """Whole tensors that stage 3 updates together: a group ends with the tensor whose part fills it
    (``_create_fp16_sub_groups``); matrices come first, and ``vectors`` share none with them."""
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
    """The optimizer's groups: matrices, and ``vectors``, which do not decay; either may be empty."""
    marks = vectors or (False,) * len(sizes)
    matrices = [size for size, is_vector in zip(sizes, marks, strict=True) if not is_vector]
    return matrices, [size for size, is_vector in zip(sizes, marks, strict=True) if is_vector]
