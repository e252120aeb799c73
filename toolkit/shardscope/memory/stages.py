"""Which weights one rank of each pipeline stage is responsible for, once tp and ep have cut them."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from shardscope.memory.arithmetic import ceil_div
from shardscope.memory.lora import first_layer, layer_adapters

if TYPE_CHECKING:
    from shardscope.architecture import Architecture
    from shardscope.plan import Plan

# Small matrices that every tensor-parallel rank keeps whole: latent attention's down projections
# (DeepSeek-V2, section 2.1), the router, and the gate of Qwen's shared expert.
_WHOLE = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "gate", "router", "shared_expert_gate"})
# Column-parallel projections; their biases are cut with them (Shoeybi et al. 2019, section 3).
_COLUMN = frozenset({
    "q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value", "q_b_proj", "kv_b_proj",
    "gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1", "dense_h_to_4h",
})  # fmt: skip
# Row-parallel projections are cut along their inputs, the second dimension.
_ROW = frozenset({"o_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h", "fc2"})


class Shard(NamedTuple):
    """Weights of one kind of decoder layer on one rank, and how much of them a sharding rank keeps."""

    dense: int
    """Everything but routed experts, after tp."""
    experts: int
    """Routed experts, after ep and tp."""
    dense_padded: int
    """One sharding rank's part of ``dense``: each tensor is cut along its first dimension, rounded up."""
    experts_padded: int
    """One sharding rank's part of ``experts``."""


class Stage(NamedTuple):
    """One pipeline stage's weights on one rank. Counts, not bytes."""

    number: int
    """From 0, first to last."""
    num_layers: int
    num_moe_layers: int
    """Decoder layers with routed experts among them."""
    is_first: bool
    is_last: bool
    layers: int
    """All decoder layers but their routed experts."""
    experts: int
    """Routed experts of all decoder layers."""
    edges: int
    """Embeddings on the first stage; final norm and output head on the last."""
    head: int
    """The output head among them: its gradient is there from the start of backward."""
    shard: int
    """What one sharding rank keeps of layers, experts and edges, rounded up tensor by tensor."""
    largest_layer: int
    """The largest decoder layer, experts included: what a gather moves."""
    trainable: int
    """Weights that get gradients: all of them, or the adapters."""
    trainable_shard: int
    """What one sharding rank keeps of ``trainable``."""
    adapters: int
    """LoRA weights on top of the base model (0 in full training)."""

    @property
    def base(self) -> int:
        """All weights of the model itself."""
        return self.layers + self.experts + self.edges


def stages_of(plan: Plan, vocab_multiple: int = 1) -> list[Stage]:
    """Every pipeline stage of a plan.

    ``vocab_multiple`` pads the vocabulary (Megatron: to 128 x tp).
    """
    moe_before = _moe_layers_before(plan.architecture)
    last = plan.degrees.pp - 1
    start, found = 0, []
    known: dict[tuple[bool, bool, int, int], Stage] = {}
    for index, num_layers in enumerate(plan.stage_layers):
        moe_layers = moe_before[start + num_layers] - moe_before[start]
        shape = (index == 0, index == last, num_layers, moe_layers)
        if shape not in known:
            known[shape] = _stage(plan, index, num_layers, moe_layers, vocab_multiple)
        found.append(Stage(index, *known[shape][1:]))
        start += num_layers
    return found


def _stage(plan: Plan, index: int, num_layers: int, moe_layers: int, vocab_multiple: int) -> Stage:
    arch, degrees = plan.architecture, plan.degrees
    num_shards = degrees.shard * degrees.cp
    is_first, is_last = index == 0, index == degrees.pp - 1
    dense_layers = num_layers - moe_layers
    nothing = Shard(0, 0, 0, 0)
    dense = layer_shard(arch, False, degrees.tp, degrees.ep, num_shards) if dense_layers else nothing
    moe = layer_shard(arch, True, degrees.tp, degrees.ep, num_shards) if moe_layers else nothing

    edge_shapes = outer_shapes(plan, is_first, is_last, vocab_multiple)
    edges = sum(length * width for _, length, width in edge_shapes)
    layers = dense_layers * dense.dense + moe_layers * moe.dense
    experts = moe_layers * moe.experts
    shard = (
        dense_layers * dense.dense_padded
        + moe_layers * (moe.dense_padded + moe.experts_padded)
        + sum(ceil_div(length, num_shards) * width for _, length, width in edge_shapes)
    )
    adapters = adapters_shard = 0
    if plan.recipe.has_adapters:
        for layers_of_kind, is_moe in ((dense_layers, False), (moe_layers, True)):
            if layers_of_kind:
                whole, part = layer_adapters(arch, plan.recipe, is_moe, num_shards)
                adapters += layers_of_kind * ceil_div(whole, degrees.tp)
                adapters_shard += layers_of_kind * ceil_div(part, degrees.tp)
    trainable = adapters or layers + experts + edges
    return Stage(
        number=index,
        num_layers=num_layers,
        num_moe_layers=moe_layers,
        is_first=is_first,
        is_last=is_last,
        layers=layers,
        experts=experts,
        edges=edges,
        head=vocab_rows(plan, vocab_multiple) * arch.hidden_size if is_last else 0,
        shard=shard,
        largest_layer=max(dense.dense, moe.dense + moe.experts),
        trainable=trainable,
        trainable_shard=adapters_shard if adapters else shard,
        adapters=adapters,
    )


def vocab_rows(plan: Plan, vocab_multiple: int = 1) -> int:
    """Rows of the embedding or head on one tensor-parallel rank, padding included."""
    vocab = ceil_div(plan.architecture.vocab_size, vocab_multiple) * vocab_multiple
    rows: int = ceil_div(vocab, plan.degrees.tp)
    return rows


def outer_shapes(
    plan: Plan, is_first: bool, is_last: bool, vocab_multiple: int = 1
) -> list[tuple[str, int, int]]:
    """(group, rows, columns) of each tensor outside the layers on one rank of a stage."""
    arch, rows = plan.architecture, vocab_rows(plan, vocab_multiple)
    hidden = arch.hidden_size
    found: list[tuple[str, int, int]] = []
    if is_first:
        found.append(("embedding", rows, hidden))
        positions: int = ceil_div(arch.position_embedding_parameters, hidden)
        if positions:
            found.append(("embedding", positions, hidden))
    if is_last:
        found += [("norm", hidden, 1)] * (arch.final_norm_parameters // hidden)
        # A tied head is the embedding itself, unless pipeline stages lie between them: then it is a copy.
        if not (arch.tie_word_embeddings and is_first):
            found.append(("lm_head", rows, hidden))
        if arch.model_type == "phi":
            found.append(("lm_head", rows, 1))
    return found


@lru_cache(maxsize=256)
def _moe_layers_before(architecture: Architecture) -> tuple[int, ...]:
    """MoE layers among the first 0, 1, 2, ... decoder layers."""
    flags = (architecture.is_moe_layer(index) for index in range(architecture.num_hidden_layers))
    return (0, *accumulate(flags))


@lru_cache(maxsize=4096)
def layer_shard(architecture: Architecture, moe: bool, tp: int, ep: int, num_shards: int) -> Shard:
    """One decoder layer's weights on one rank, dense (``moe=False``) or with routed experts."""
    dense = experts = dense_padded = experts_padded = 0
    for group, _, copies, rows, columns in rank_shapes(architecture, moe, tp, ep):
        if group == "experts":
            # One row is one expert, so a rank may keep a whole expert, or none.
            experts += copies * rows * columns
            experts_padded += ceil_div(copies, max(1, num_shards // ep)) * rows * columns
            continue
        dense += rows * columns
        dense_padded += ceil_div(rows, num_shards) * columns
    return Shard(dense, experts, dense_padded, experts_padded)


class RankShape(NamedTuple):
    """One tensor of a decoder layer on one rank, after tp and ep."""

    group: str
    name: str
    copies: int
    """Experts in it; 1 for others."""
    rows: int
    columns: int
    """1 for vectors."""


@lru_cache(maxsize=4096)
def rank_shapes(architecture: Architecture, moe: bool, tp: int, ep: int) -> tuple[RankShape, ...]:
    """Every tensor of one decoder layer on one rank."""
    found = []
    for group, name, shape in architecture.layer_shapes(first_layer(architecture, moe)):
        numel = 1
        for size in shape:
            numel *= size
        if group == "experts":
            # tp cuts each expert's inner width; which side that is does not change the count.
            rows = shape[1] if len(shape) > 2 else 1
            columns = numel // shape[0] // rows
            if not name.endswith("down_proj_bias"):  # added once the ranks' parts are summed
                columns = ceil_div(columns, tp)
            found.append(RankShape(group, name, ceil_div(shape[0], ep), rows, columns))
            continue
        rows, columns = shape[0], numel // shape[0]
        if _is_cut(name, shape):
            if _module(name) in _ROW:
                columns = ceil_div(columns, tp)
            else:
                rows = ceil_div(rows, tp)
        found.append(RankShape(group, name, 1, rows, columns))
    return tuple(found)


def _is_cut(name: str, shape: tuple[int, ...]) -> bool:
    module = _module(name)
    if module in _WHOLE:
        return False
    # gpt-oss has one sink for each head.
    return len(shape) > 1 or name.endswith("sinks") or (name.endswith("bias") and module in _COLUMN)


def _module(name: str) -> str:
    """Whose parameter it is: "o_proj" of "self_attn.o_proj.weight"."""
    return name.split(".")[-2]
