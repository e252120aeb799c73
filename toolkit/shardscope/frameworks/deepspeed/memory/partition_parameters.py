"""Tensors of one rank in model order, and how ZeRO-3 partitions them.

ZeRO's padding, the gradients that a rank keeps and the persistent parameters depend on the sizes of single
tensors, so totals are not enough. ZeRO-3 partitions each tensor by itself
(``deepspeed/runtime/zero/partition_parameters.py``, DeepSpeed 0.19) and updates sub-groups of them
(``_create_fp16_sub_groups``, ``deepspeed/runtime/zero/stage3.py``).
"""

from __future__ import annotations

from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from shardscope.core.ops import ceil_div, map_distinct
from shardscope.families.parameter_names import list_parameter_names
from shardscope.families.parameter_shapes import find_first_layer
from shardscope.families.registry import find_family
from shardscope.frameworks.deepspeed.layout import get_layout
from shardscope.memory.state.lora import Adapters, find_adapters
from shardscope.memory.state.stages import EMBEDDING_GROUPS, list_outer_tensors, list_rank_shapes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import RankShape, Stage

_Number = TypeVar("_Number", bound=int)
Norm = TypeVar("Norm")

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


class RankTensors(NamedTuple):
    """Elements of every tensor on one rank, in the model's order."""

    trained: Many[int]
    """Tensors with gradients; with expert parallelism, without routed experts."""
    experts: Many[int]
    """Routed experts with gradients, if expert parallelism puts them into a separate parameter group."""
    frozen: Many[int]
    """Frozen tensors under adapters."""
    used: Many[int]
    """All tensors, in the order of their use in forward."""
    trained_before: int
    """Number of tensors of ``trained`` before the first decoder layer."""
    trained_per_layer: tuple[int, ...]
    """Number of tensors of ``trained`` in each decoder layer."""
    num_attention: int
    """Number of a decoder layer's tensors that forward has used at the end of attention."""
    is_feed_forward: Many[bool] = Many()
    """Flags of ``trained``: a feed-forward's large matrices; empty with adapters."""
    is_vector: Many[bool] = Many()
    """Flags of ``trained``: vectors, which have no weight decay and so a separate flat buffer."""
    gradient_order: Many[int] = Many()
    """Indices into ``trained``, in the order of their gradients."""

    @property
    def trained_per_part(self) -> tuple[int, ...]:
        """Number of trained tensors in each part of backward: head, each layer from the last, embedding."""
        behind = len(self.trained) - self.trained_before - sum(self.trained_per_layer)
        return (behind, *reversed(self.trained_per_layer), self.trained_before)


# ---- The tensors of one rank


def shards_tied_head(arch: Architecture) -> bool:
    """Return whether AutoTP shards an embedding that is tied to the head; else it is replicated.

    Source: ``VocabParallelEmbedding.validate_embedding`` (deepspeed/module_inject/layers.py). If it fails the
    engine keeps both replicated (``_apply_autotp_partitioning``, deepspeed/runtime/engine.py).
    """
    return arch.tie_word_embeddings and not find_family(arch).has_own_embedding_class


def list_stage_tensors(plan: Plan, stage: Stage) -> RankTensors:
    """Return the tensors of one rank of ``stage``."""
    degrees, moe_layers = plan.degrees, stage.num_moe_layers
    return list_tensors(
        plan.architecture,
        find_adapters(plan.architecture, plan.recipe),
        degrees.tp,
        degrees.ep,
        stage.num_layers - moe_layers,
        moe_layers,
        int(stage.is_first),
        int(stage.is_last),
    )


@lru_cache(maxsize=1024)
def list_tensors(
    arch: Architecture,
    adapters: Adapters | None,
    tp: int,
    ep: int,
    dense_layers: int,
    moe_layers: int,
    is_first: int,
    is_last: int,
) -> RankTensors:
    """Return the tensors of one rank of a stage, given its layers."""
    # AutoTP shards an embedding only if it is tied to the head.
    first = list_outer_tensors(arch, tp if shards_tied_head(arch) else 1, is_first, is_last)
    last = list_outer_tensors(arch, tp, is_first, is_last)
    before = tuple((rows, columns) for group, rows, columns in first if group in EMBEDDING_GROUPS and rows)
    behind = tuple((rows, columns) for group, rows, columns in last if group not in EMBEDDING_GROUPS)
    return _list_tensors(arch, adapters, tp, ep, dense_layers, moe_layers, before, behind)


@lru_cache(maxsize=512)
def _list_tensors(
    arch: Architecture,
    adapters: Adapters | None,
    tp: int,
    ep: int,
    dense_layers: int,
    moe_layers: int,
    outer_before: tuple[tuple[int, int], ...],
    outer_behind: tuple[tuple[int, int], ...],
) -> RankTensors:
    before, behind = (
        tuple(rows * columns for rows, columns in part) for part in (outer_before, outer_behind)
    )
    # Before the layers: the embeddings, frozen under adapters.
    trained: list[int] = []
    experts: list[int] = []
    frozen: list[int] = []
    used: list[int] = list(before)
    trained_per_layer: list[int] = []
    is_feed_forward = [False] * len(before)
    is_vector = [columns == 1 for _, columns in outer_before]
    (frozen if adapters else trained).extend(before)
    forward_order = list(range(len(trained)))
    # Dense layers come first (DeepSeek's first_k_dense_replace); if kinds alternate, the sizes are the same.
    for moe, count in ((False, dense_layers), (True, moe_layers)):
        if not count:
            continue
        layer, layer_experts, layer_frozen, layer_used = _list_layer_tensors(arch, adapters, moe, tp, ep)
        order = range(len(layer)) if adapters else _order_layer_in_forward(arch, moe, tp, ep)
        forward_order.extend(
            len(trained) + repeat * len(layer) + index for repeat in range(count) for index in order
        )
        trained.extend(layer * count)
        is_feed_forward.extend(_flag_feed_forward(arch, moe, tp, ep) * count)
        is_vector.extend(_flag_vectors(arch, moe, tp, ep) * count)
        experts.extend(layer_experts * count)
        frozen.extend(layer_frozen * count)
        used.extend(layer_used * count)
        trained_per_layer.extend([len(layer)] * count)
    # After the layers: the final norm and the head.
    used.extend(behind)
    (frozen if adapters else trained).extend(behind)
    forward_order.extend(range(len(forward_order), len(trained)))
    return RankTensors(
        trained=Many(trained),
        experts=Many(experts),
        frozen=Many(frozen),
        used=Many(used),
        trained_before=0 if adapters else len(before),
        trained_per_layer=tuple(trained_per_layer),
        num_attention=_count_attention_tensors(arch, adapters is not None),
        is_feed_forward=Many(() if adapters else (*is_feed_forward, *(False for _ in behind))),
        is_vector=Many(() if adapters else (*is_vector, *(columns == 1 for _, columns in outer_behind))),
        gradient_order=Many(reversed(forward_order)),
    )


@lru_cache(maxsize=512)
def _list_layer_tensors(
    arch: Architecture, adapters: Adapters | None, moe: bool, tp: int, ep: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return trained, expert and frozen tensors of a decoder layer, and all of them in the order of use."""
    shapes = list_rank_shapes(arch, moe, tp, ep)
    sizes = [(shape.group, shape.copies * shape.rows * shape.columns) for shape in shapes]
    used = tuple(size for _, size in sizes)
    if adapters is None:
        # Expert parallelism makes the routed experts a parameter group of their own.
        has_expert_group = ep > 1
        trained = tuple(size for group, size in sizes if not (has_expert_group and group == "experts"))
        experts = _list_experts([shape for shape in shapes if has_expert_group and shape.group == "experts"])
        return trained, experts, (), used
    targets, rank, _ = adapters
    adapter_sizes: list[int] = []
    for target, (outputs, inputs) in arch.layer_linears(find_first_layer(arch, moe)):
        if target in targets:
            adapter_sizes += [rank * inputs, rank * outputs]
    return tuple(ceil_div(size, tp) for size in adapter_sizes), (), used, (*used, *adapter_sizes)


def _list_experts(stacked: list[RankShape]) -> tuple[int, ...]:
    """Return the tensors of DeepSpeed's experts, each of which is a module (deepspeed/moe/experts.py)."""
    num_experts = stacked[0].copies if stacked else 0
    return tuple(shape.rows * shape.columns for _ in range(num_experts) for shape in stacked)


# ---- The order of a decoder layer's tensors


def split_norms(arch: Architecture, norms: list[Norm]) -> tuple[list[Norm], list[Norm], list[Norm]]:
    """Split ``norms``, in registration order: before attention, before and after the feed-forward."""
    before, between, behind = (
        [norms[index] for index in indices if index < len(norms)]
        for indices in find_family(arch).norm_placement
    )
    return before, between, behind


def _list_norms(arch: Architecture, names: Iterable[str]) -> list[list[int]]:
    """Return the indices into ``names`` of each norm outside of attention and feed-forward."""
    halves = (f"{list_parameter_names(arch).attention}.", "mlp.")
    norms: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        if not name.startswith(halves):
            norms.setdefault(name.rpartition(".")[0], []).append(index)
    return list(norms.values())


def _count_attention_tensors(arch: Architecture, has_adapters: bool) -> int:
    """Return the number of attention's tensors; without adapters, plus those of the norms before it."""
    prefix = f"{list_parameter_names(arch).attention}."
    names = [name for _, name, _ in arch.layer_shapes(0)]
    num_attention = sum(name.startswith(prefix) for name in names)
    if has_adapters:
        return num_attention
    norms_before, _, _ = split_norms(arch, _list_norms(arch, names))
    return num_attention + sum(map(len, norms_before))


def _list_shapes_without_expert_group(arch: Architecture, moe: bool, tp: int, ep: int) -> list[RankShape]:
    """Return the shapes of a decoder layer's tensors, without experts that have a separate group."""
    return [
        shape for shape in list_rank_shapes(arch, moe, tp, ep) if not (ep > 1 and shape.group == "experts")
    ]


def _order_layer_in_forward(arch: Architecture, moe: bool, tp: int, ep: int) -> list[int]:
    """Return the indices of a decoder layer's tensors, all trained, in forward order; norms register last."""
    # transformers registers the norms last; forward runs each before or after attention or the feed-forward.
    names = [shape.name for shape in _list_shapes_without_expert_group(arch, moe, tp, ep)]
    feed_forward = [index for index, name in enumerate(names) if name.startswith("mlp.")]
    before, between, behind = (
        [index for norm in norms for index in norm] for norms in split_norms(arch, _list_norms(arch, names))
    )
    not_attention = {*before, *between, *behind, *feed_forward}
    attention = [index for index in range(len(names)) if index not in not_attention]
    return [*before, *attention, *between, *feed_forward, *behind]


def _flag_feed_forward(arch: Architecture, moe: bool, tp: int, ep: int) -> tuple[bool, ...]:
    """Return which tensors of a decoder layer, all trained, are a feed-forward's large matrices."""
    names = list_parameter_names(arch)
    routers = (names.router, f"{names.shared_experts}_gate")
    return tuple(
        shape.name.startswith("mlp.") and shape.columns > 1 and shape.name.rpartition(".")[0] not in routers
        for shape in _list_shapes_without_expert_group(arch, moe, tp, ep)
    )


def _flag_vectors(arch: Architecture, moe: bool, tp: int, ep: int) -> tuple[bool, ...]:
    """Return which tensors of a decoder layer, all trained, are vectors."""
    return tuple(
        shape.copies == shape.columns == 1 for shape in _list_shapes_without_expert_group(arch, moe, tp, ep)
    )


# ---- Partitions and sub-groups of stage 3


@lru_cache(maxsize=4096)
def sum_partitions(sizes: tuple[int, ...], num_ranks: int) -> int:
    """Return the elements on one rank of stage 3: every tensor is partitioned, rounded up."""
    return sum(ceil_div(size, num_ranks) for size in sizes)


def split_by_decay(sizes: tuple[int, ...], is_vector: tuple[bool, ...]) -> tuple[list[int], list[int]]:
    """Return the optimizer's parameter groups: matrices, and vectors, without weight decay."""
    flags = is_vector or (False,) * len(sizes)
    matrices = [size for size, flag in zip(sizes, flags, strict=True) if not flag]
    return matrices, [size for size, flag in zip(sizes, flags, strict=True) if flag]


def create_sub_groups(
    sizes: tuple[int, ...], num_ranks: int, sub_group_size: int, is_vector: tuple[bool, ...] = ()
) -> list[list[int]]:
    """Return stage 3's sub-groups, the tensors that are updated together, as unpartitioned sizes.

    A sub-group ends with the tensor whose partition fills it (``_create_fp16_sub_groups``); matrices come
    first, and vectors are in separate sub-groups.
    """
    sub_groups: list[list[int]] = []
    for group in filter(None, split_by_decay(sizes, is_vector)):
        sub_groups.append([])
        elements = 0
        for size in group:
            if elements >= sub_group_size:
                sub_groups.append([])
                elements = 0
            sub_groups[-1].append(size)
            elements += ceil_div(size, num_ranks)
    return sub_groups


@lru_cache(maxsize=4096)
def find_largest_sub_group(
    sizes: tuple[int, ...], num_ranks: int, sub_group_size: int, is_vector: tuple[bool, ...] = ()
) -> int:
    """Return the elements of one rank's partitions of stage 3's largest sub-group."""
    sub_groups = create_sub_groups(sizes, num_ranks, sub_group_size, is_vector)
    return max(sum_partitions(tuple(sub_group), num_ranks) for sub_group in sub_groups)


# ---- Secondary partitions of stage 3's weights (ZeRO++'s hpZ, Wang et al. 2023, section 3.2)


class SecondaryPartitions(NamedTuple):
    """Elements of one rank's secondary partitions (hpZ), over ``zero_hpz_partition_size`` ranks."""

    trained: int = 0
    """Trained, not persistent weights: from the release in forward until the optimizer step."""
    frozen: int = 0
    """Frozen weights, permanently."""
    at_init: int = 0
    """All weights, as created by ``zero.Init``."""

    @property
    def in_step(self) -> int:
        """Maximum in a step."""
        return self.trained + self.frozen


def count_secondary_partitions(plan: Plan) -> SecondaryPartitions:
    """Return the secondary partitions of one rank; zeros unless the layout enables them.

    Source: ``_partition_param_sec`` (partition_parameters.py), and ``_post_step`` (stage3.py), which drops
    those of trained weights.
    """
    layout = get_layout(plan)
    group = layout.zero_hpz_partition_size
    if group == 1:
        return SecondaryPartitions()
    arch, ranks = plan.architecture, plan.degrees.data_parallel
    moe_layers = arch.num_moe_layers
    dense_layers = arch.num_hidden_layers - moe_layers
    tensors = list_tensors(arch, find_adapters(arch, plan.recipe), 1, 1, dense_layers, moe_layers, 1, 1)
    # Persistent parameters are never released, so nothing is all-gathered again from a secondary partition.
    threshold = layout.stage3_param_persistence_threshold
    not_persistent = tuple(size for size in tensors.trained if size > threshold)

    def count_partitions(sizes: tuple[int, ...]) -> int:
        # Padded for all ranks first, then partitioned over the smaller group.
        return map_distinct(partial(sum_partitions, sizes), ranks) * ranks // group

    return SecondaryPartitions(
        trained=count_partitions(not_persistent),
        frozen=count_partitions(tensors.frozen),
        at_init=count_partitions((*tensors.trained, *tensors.frozen)),
    )
