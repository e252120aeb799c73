"""Weights of one rank of each pipeline stage, after tensor and expert parallelism."""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import (
    any_true,
    cache_by_numbers,
    ceil_div,
    group_equal,
    map_distinct,
    maximum,
)
from shardscope.families.parameter_names import list_parameter_names
from shardscope.families.parameter_shapes import find_first_layer
from shardscope.families.registry import find_family
from shardscope.memory.state.lora import Adapters, count_layer_adapters, find_adapters

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan

# Small matrices that are replicated on every tensor-parallel rank: latent attention's down projections
# (DeepSeek-V2, section 2.1), the router, and the gate of Qwen's shared expert.
_REPLICATED = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "gate", "router", "shared_expert_gate"})
# Column-parallel projections; their biases are sharded with them (Shoeybi et al. 2019, section 3).
_COLUMN = frozenset({
    "q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value", "q_b_proj", "kv_b_proj",
    "gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1", "dense_h_to_4h",
})  # fmt: skip
# Row-parallel projections are sharded along their inputs, the second dimension.
_ROW = frozenset({"o_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h", "fc2"})


class LayerShard(NamedTuple):
    """Number of weights of one decoder layer on one rank, before and after data-parallel sharding."""

    dense: int
    """All but routed experts, after tp."""
    experts: int
    """Routed experts, after ep and tp."""
    dense_padded: int
    """One data-parallel shard of ``dense``: each tensor is sharded along its first dimension, rounded up."""
    experts_padded: int
    """One data-parallel shard of ``experts``."""


class Stage(NamedTuple):
    """One pipeline stage's weights on one rank. Counts, not bytes; arrays for many plans."""

    number: int
    """Index of the stage, from 0."""
    num_layers: int
    num_moe_layers: int
    """Number of decoder layers with routed experts."""
    is_first: bool
    is_last: bool
    layers: int
    """Weights of all decoder layers without routed experts."""
    experts: int
    """Weights of the routed experts of all decoder layers."""
    edges: int
    """Embeddings on the first stage; final norm and output head on the last."""
    head: int
    """The output head's part of ``edges``: its gradient exists from the start of backward."""
    shard: int
    """One rank's shard of layers, experts and edges, rounded up tensor by tensor."""
    edge_shard: int
    """One rank's shard of ``edges``."""
    largest_layer: int
    """Weights of the largest decoder layer, experts included: the size of one all-gather."""
    largest_shard: int
    """One rank's shard of the largest layer."""
    trainable: int
    """Weights with gradients: all of them, or the adapters."""
    trainable_shard: int
    """One rank's shard of ``trainable``."""
    adapters: int
    """LoRA weights on top of the base model (0 in full training)."""

    @property
    def base(self) -> int:
        """All weights of the model itself."""
        return self.layers + self.experts + self.edges


def count_layers_by_kind(arch: Architecture, stage: Stage) -> list[tuple[bool, int]]:
    """Return (has routed experts, number of layers on the stage) for each kind of layer in the model."""
    return count_by_kind(arch, stage.num_layers, stage.num_moe_layers)


def count_by_kind(arch: Architecture, num_layers: int, moe_layers: int) -> list[tuple[bool, int]]:
    """Return the same as :func:`count_layers_by_kind` for a stage with these numbers of layers."""
    if not arch.num_moe_layers:
        return [(False, num_layers)]
    if arch.num_moe_layers == arch.num_hidden_layers:
        return [(True, moe_layers)]
    return [(False, num_layers - moe_layers), (True, moe_layers)]


class RecomputedLayers(NamedTuple):
    """Layers of one kind on a stage, and those of them that are recomputed or offloaded."""

    moe: bool
    """Whether they have routed experts."""
    num_layers: int
    num_recomputed: int


def count_recomputed_by_kind(arch: Architecture, stage: Stage, interval: int) -> list[RecomputedLayers]:
    """Return the layers of each kind on the stage if every ``interval``-th layer is recomputed.

    The engine recomputes layers 0, interval, 2 x interval, ... of the stage
    (``training/model/recompute.py``): ceil(n / interval) of the first n.
    """
    by_kind = count_layers_by_kind(arch, stage)
    if interval == 1:
        return [RecomputedLayers(moe, num_layers, num_layers) for moe, num_layers in by_kind]
    counts: list[RecomputedLayers] = []
    layers_so_far = recomputed_so_far = 0
    for moe, num_layers in by_kind:
        layers_so_far = layers_so_far + num_layers
        recomputed = ceil_div(layers_so_far, interval) - recomputed_so_far
        recomputed_so_far = recomputed_so_far + recomputed
        counts.append(RecomputedLayers(moe, num_layers, recomputed))
    return counts


class StageShape(NamedTuple):
    """Properties that distinguish one pipeline stage from the next, before weights are counted."""

    number: int
    """Index of the stage, from 0."""
    is_first: bool
    is_last: bool
    num_layers: int
    num_moe_layers: int


class StageShapes(NamedTuple):
    """A pipeline's stages, deduplicated: most stages of a long pipeline are identical."""

    kinds: tuple[StageShape, ...]
    """The first stage of each kind: it has the most micro-batches in flight of that kind."""
    kind_of: tuple[int, ...]
    """Index into ``kinds`` of each stage, first to last."""


@lru_cache(maxsize=4096)
def find_stage_shapes(
    architecture: Architecture, stage_layers: tuple[int, ...], moe_layers: tuple[int, ...] | None = None
) -> StageShapes:
    """Return the stages with these numbers of layers.

    ``moe_layers`` is the number of layers with routed experts on each stage, if stages are not consecutive
    layers.
    """
    # The MoE layers of a stage of consecutive layers: a difference of two running counts.
    if moe_layers is None:
        before = _moe_layers_before(architecture)
        ends = list(accumulate(stage_layers))
        moe_layers = tuple(
            before[end] - before[end - layers] for end, layers in zip(ends, stage_layers, strict=True)
        )
    # setdefault keeps the first stage of a kind, which has the most micro-batches in flight.
    kinds: dict[tuple[bool, bool, int, int], StageShape] = {}
    keys: list[tuple[bool, bool, int, int]] = []
    for number, counts in enumerate(zip(stage_layers, moe_layers, strict=True)):
        shape = (number == 0, number == len(stage_layers) - 1, *counts)
        kinds.setdefault(shape, StageShape(number, *shape))
        keys.append(shape)
    indices = {shape: index for index, shape in enumerate(kinds)}
    return StageShapes(tuple(kinds.values()), tuple(indices[shape] for shape in keys))


def count_stage_weights(plan: Plan, shape: StageShape, vocab_multiple: int = 1) -> Stage:
    """Return the weights of one stage on one rank.

    ``vocab_multiple`` pads the vocabulary (Megatron: to 128 x tp).
    """
    degrees = plan.degrees
    num_shards = group_equal(degrees.shard * degrees.cp)
    # Count all weights as trained first: that does not depend on the recipe, and so is cached for all plans.
    weights = _count_trained_stage(
        plan.architecture, degrees.tp, degrees.ep, num_shards, vocab_multiple, *shape
    )
    adapters = find_adapters(plan.architecture, plan.recipe)
    if adapters is None:
        return weights
    kinds = count_by_kind(plan.architecture, shape.num_layers, shape.num_moe_layers)
    total, shard = _count_adapters(plan, adapters, kinds, num_shards)
    return weights._replace(trainable=total, trainable_shard=shard, adapters=total)


@cache_by_numbers
def _count_trained_stage(
    arch: Architecture,
    tp: int,
    ep: int,
    num_shards: int,
    vocab_multiple: int,
    number: int,
    is_first: bool,
    is_last: bool,
    num_layers: int,
    moe_layers: int,
) -> Stage:
    """Return a fully trained stage; cached, because memory and timing of many plans need the same ones."""
    # Decoder layers, then the tensors outside of them. ``count > 0`` excludes a kind that the stage lacks.
    layers = experts = edges = shard = edge_shard = largest_layer = largest_shard = 0
    for moe, count in count_by_kind(arch, num_layers, moe_layers):
        layer = map_distinct(partial(count_layer_shard, arch, moe), tp, ep, num_shards)
        layers += count * layer.dense
        experts += count * layer.experts
        padded = layer.dense_padded + layer.experts_padded
        shard += count * padded
        largest_layer = maximum(largest_layer, (count > 0) * (layer.dense + layer.experts))
        largest_shard = maximum(largest_shard, (count > 0) * padded)
    for _, rows, columns in list_outer_tensors(arch, tp, is_first, is_last, vocab_multiple):
        edges += rows * columns
        edge_shard += ceil_div(rows, num_shards) * columns
    shard += edge_shard
    return Stage(
        number=number,
        num_layers=num_layers,
        num_moe_layers=moe_layers,
        is_first=is_first,
        is_last=is_last,
        layers=layers,
        experts=experts,
        edges=edges,
        head=is_last * _count_vocab_rows(arch, tp, vocab_multiple) * arch.hidden_size,
        shard=shard,
        edge_shard=edge_shard,
        largest_layer=largest_layer,
        largest_shard=largest_shard,
        trainable=layers + experts + edges,
        trainable_shard=shard,
        adapters=0,
    )


def _count_adapters(
    plan: Plan, adapters: Adapters, kinds: list[tuple[bool, int]], num_shards: int
) -> tuple[int, int]:
    """Return adapter weights of a stage, and one rank's shard of them."""
    arch, tp = plan.architecture, plan.degrees.tp
    total = shard = 0
    for moe, layers in kinds:
        in_layer, in_shard = map_distinct(partial(count_layer_adapters, arch, adapters, moe), num_shards)
        total += layers * ceil_div(in_layer, tp)
        shard += layers * ceil_div(in_shard, tp)
    return total, shard


def count_vocab_rows(plan: Plan, vocab_multiple: int = 1) -> int:
    """Return rows of the embedding or head on one tensor-parallel rank, padding included."""
    return _count_vocab_rows(plan.architecture, plan.degrees.tp, vocab_multiple)


def _count_vocab_rows(arch: Architecture, tp: int, vocab_multiple: int) -> int:
    # Pad the vocabulary first, then shard it.
    return ceil_div(ceil_div(arch.vocab_size, vocab_multiple) * vocab_multiple, tp)


EMBEDDING_GROUPS = ("embedding", "positions")
"""Groups of :func:`list_outer_tensors` before the first layer."""


def list_outer_tensors(
    arch: Architecture, tp: int, is_first: int, is_last: int, vocab_multiple: int = 1
) -> list[tuple[str, int, int]]:
    """Return (group, rows, columns) of each tensor outside the layers on one rank of a stage.

    For arrays of plans, plans without a tensor have 0 rows of it.
    """
    rows, hidden = _count_vocab_rows(arch, tp, vocab_multiple), arch.hidden_size
    tensors: list[tuple[str, int, int]] = []
    if any_true(is_first):
        tensors.append(("embedding", is_first * rows, hidden))
        positions = ceil_div(arch.position_embedding_parameters, hidden)
        if positions:
            tensors.append(("positions", is_first * positions, hidden))
    if any_true(is_last):
        # LayerNorm has a bias as well: two vectors.
        tensors += [("norm", is_last * hidden, 1)] * (arch.final_norm_parameters // hidden)
        # A tied head is the embedding itself, unless pipeline stages lie between them: then it is a copy.
        has_head = is_last * (1 - is_first) if arch.tie_word_embeddings else is_last
        if any_true(has_head):
            tensors.append(("lm_head", has_head * rows, hidden))
        if find_family(arch).has_head_bias:
            tensors.append(("lm_head", is_last * rows, 1))
    return tensors


@lru_cache(maxsize=256)
def _moe_layers_before(architecture: Architecture) -> tuple[int, ...]:
    """Return the number of MoE layers among the first 0, 1, 2, ... decoder layers."""
    flags = (architecture.is_moe_layer(index) for index in range(architecture.num_hidden_layers))
    return (0, *accumulate(flags))


@lru_cache(maxsize=4096)
def count_layer_shard(architecture: Architecture, moe: bool, tp: int, ep: int, num_shards: int) -> LayerShard:
    """Return one decoder layer's weights on one rank, dense (``moe=False``) or with routed experts."""
    dense = experts = dense_padded = experts_padded = 0
    for group, _, copies, rows, columns in list_rank_shapes(architecture, moe, tp, ep):
        if group == "experts":
            # One row is one expert, so a rank keeps whole experts, or none.
            experts += copies * rows * columns
            experts_padded += ceil_div(copies, max(1, num_shards // ep)) * rows * columns
            continue
        dense += rows * columns
        dense_padded += ceil_div(rows, num_shards) * columns
    return LayerShard(dense, experts, dense_padded, experts_padded)


class RankShape(NamedTuple):
    """One tensor of a decoder layer on one rank, after tp and ep."""

    group: str
    name: str
    copies: int
    """Number of experts in it; 1 for other tensors."""
    rows: int
    columns: int
    """1 for vectors."""


@lru_cache(maxsize=4096)
def list_rank_shapes(architecture: Architecture, moe: bool, tp: int, ep: int) -> tuple[RankShape, ...]:
    """Return every tensor of one decoder layer on one rank."""
    tensors = []
    for group, name, shape in architecture.layer_shapes(find_first_layer(architecture, moe)):
        # Rows of the first dimension, along which data parallelism shards a tensor, whatever its shape.
        numel = 1
        for size in shape:
            numel *= size
        if group == "experts":
            # tp shards each expert's intermediate size; which side that is does not change the count.
            rows = shape[1] if len(shape) > 2 else 1
            columns = numel // shape[0] // rows
            if not name.endswith("down_proj_bias"):  # added once the ranks' parts are summed
                columns = ceil_div(columns, tp)
            # (experts, rows, columns): expert parallelism shards the first dimension.
            tensors.append(RankShape(group, name, ceil_div(shape[0], ep), rows, columns))
            continue
        rows, columns = shape[0], numel // shape[0]
        if _is_sharded(name, shape):
            if _get_module_name(name) in _ROW:
                columns = ceil_div(columns, tp)
            else:
                rows = ceil_div(rows, tp)
        tensors.append(RankShape(group, name, 1, rows, columns))
    return tuple(tensors)


def is_replicated(name: str) -> bool:
    """Return whether every tensor-parallel rank has the whole matrix ``name``."""
    return _get_module_name(name) in _REPLICATED


def _is_sharded(name: str, shape: tuple[int, ...]) -> bool:
    module = _get_module_name(name)
    if module in _REPLICATED:
        return False
    # gpt-oss has one sink for each head.
    return len(shape) > 1 or name.endswith("sinks") or (name.endswith("bias") and module in _COLUMN)


def _get_module_name(name: str) -> str:
    """Return the parameter's module: "o_proj" for "self_attn.o_proj.weight"."""
    return name.split(".")[-2]


class LayerWeights(NamedTuple):
    """Number of weights of one layer's matrices on one rank, in groups that get gradients together."""

    down: int
    up: int
    """The largest matrix that reads the feed-forward's input."""
    feed_forward: int
    """The whole feed-forward, without its norm."""
    output: int
    query: int
    """The largest matrix that reads attention's input."""
    everything: int
    expert_down: int
    expert_up: int


@lru_cache(maxsize=4096)
def count_layer_weights(arch: Architecture, moe: bool, tp: int) -> LayerWeights:
    """Return the :class:`LayerWeights` of one layer on one of ``tp`` ranks."""
    names = list_parameter_names(arch)
    shapes = list_rank_shapes(arch, moe, tp, 1)

    def count_groups(*groups: str) -> int:
        return sum(s.copies * s.rows * s.columns for s in shapes if s.group in groups)

    def find_largest(module: str, group: str) -> int:
        numels = [
            s.copies * s.rows * s.columns for s in shapes if s.group == group and f".{module}" in s.name
        ]
        return max(numels, default=0)

    # In backward order: down projection, up projections, output projection, query, key and value projections.
    feed_forward = count_groups("mlp", "experts", "shared_experts", "router")
    dense_group = "shared_experts" if moe else "mlp"
    inputs = [
        s.rows * s.columns for s in shapes if s.group == dense_group and f".{names.down}." not in s.name
    ]
    attention = [
        s.rows * s.columns for s in shapes if s.group == "attention" and f".{names.output}." not in s.name
    ]
    return LayerWeights(
        down=find_largest(f"{names.down}.", dense_group),
        up=max(inputs, default=0),
        feed_forward=feed_forward,
        output=find_largest(f"{names.output}.", "attention"),
        query=max(attention, default=0),
        everything=sum(s.copies * s.rows * s.columns for s in shapes),
        expert_down=find_largest("down_proj", "experts"),
        expert_up=find_largest("gate_up_proj", "experts"),
    )
