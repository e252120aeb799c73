"""FLOPs and bytes of one layer's matmuls on one rank, summed over its matrices.

A matmul of m x k by k x n multiplies m k n pairs of numbers and moves m k + k n + m n numbers. For all
matrices of a layer with m tokens, that is m W and W + m E, where W is the number of weights and E the sum of
k + n. If k or n is not a multiple of :data:`ALIGNED`, matrix units are slower; by how much depends on the
machine.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import ceil_div, map_distinct
from shardscope.families.parameter_names import list_parameter_names
from shardscope.families.parameter_shapes import find_first_layer
from shardscope.memory.activations.modules.attention import get_attention_widths, is_unfused, passes_mask
from shardscope.memory.state.lora import Adapters
from shardscope.memory.state.stages import is_replicated, list_rank_shapes

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.memory.activations.modules.saved_tensors import Modules
    from shardscope.timing.rates import MatrixRate


ALIGNED = 64
"""Two-byte elements in 128 bytes: multiples of it are "most efficient" on A100 and later (NVIDIA's Matrix
Multiplication Background user guide, table 1)."""


def count_unaligned(rows: int, columns: int) -> int:
    """Return the weights of one matrix if a dimension is not a multiple of :data:`ALIGNED`, else 0."""
    return rows * columns if rows % ALIGNED or columns % ALIGNED else 0


class Products(NamedTuple):
    """Matrices multiplied by the same tokens."""

    weights: int
    """Number of weights."""
    edges: int
    """Sum of rows and columns over all matrices."""
    unaligned: int = 0
    """Number of weights in matrices with an unaligned dimension."""
    num_copies: int = 1
    """Number of experts that share the tokens."""

    def seconds(self, tokens: float, rate: MatrixRate) -> float:
        """Return the seconds of one matmul with each matrix for ``tokens`` tokens, over all copies."""
        moved = self.num_copies * self.weights + tokens * self.edges
        return rate.seconds(tokens * self.weights, moved, tokens * self.unaligned)


class LayerProducts(NamedTuple):
    """The matrices of one decoder layer on one rank."""

    weights: int
    edges: int
    unaligned: int
    last_weights: int
    """Weights of the last matmul, which early-stopping recomputation skips; 0 if an operator after it saves a
    tensor."""
    last_edges: int
    last_unaligned: int
    expert_weights: int
    """Weights of one routed expert."""
    expert_edges: int
    expert_unaligned: int
    replicated_weights: int
    """Weights of the matrices that tensor parallelism does not shard, a part of :attr:`weights`."""
    replicated_edges: int
    replicated_unaligned: int
    num_experts: int
    """Number of routed experts on the rank."""

    @property
    def dense(self) -> Products:
        """All matrices but routed experts."""
        return Products(self.weights, self.edges, self.unaligned)

    @property
    def sharded(self) -> Products:
        """Matrices that tensor parallelism shards, without routed experts."""
        return Products(
            self.weights - self.replicated_weights,
            self.edges - self.replicated_edges,
            self.unaligned - self.replicated_unaligned,
        )

    @property
    def replicated(self) -> Products:
        """Matrices that every tensor-parallel rank has: latent attention's down projections, routers."""
        return Products(self.replicated_weights, self.replicated_edges, self.replicated_unaligned)

    @property
    def last(self) -> Products:
        """The last matmul."""
        return Products(self.last_weights, self.last_edges, self.last_unaligned)

    @property
    def experts(self) -> Products:
        """Routed experts."""
        return Products(self.expert_weights, self.expert_edges, self.expert_unaligned, self.num_experts)


def count_layer_products(arch: Architecture, moe: bool, tp: int, ep: int, expert_tp: int) -> LayerProducts:
    """Return one layer's matrices, dense or with routed experts; arrays of degrees give arrays."""
    products: LayerProducts = map_distinct(partial(_list_layer_products, arch, moe), tp, ep, expert_tp)
    return products


@lru_cache(maxsize=4096)
def _list_layer_products(arch: Architecture, moe: bool, tp: int, ep: int, expert_tp: int) -> LayerProducts:
    dense = last = expert = replicated = _MatrixSums()
    num_experts = 0
    down = list_parameter_names(arch).down
    # Routed experts have tokens of their own (second loop); norms and biases have one column and no matmul.
    for group, name, _, rows, columns in list_rank_shapes(arch, moe, tp, ep):
        if group == "experts" or columns == 1:
            continue
        dense = dense.add_matrix(rows, columns)
        if is_replicated(name):
            replicated = replicated.add_matrix(rows, columns)
        # With a norm after the MLP, and with experts, whose outputs are weighted, an operator that saves a
        # tensor comes after the last matmul.
        if down in name and not moe and arch.norms_per_layer <= 2:
            last = _MatrixSums().add_matrix(rows, columns)
    # Inside experts the tensor-parallel degree may differ (megatron-core 0.16, model_parallel_config.py,
    # expert_tensor_parallel_size).
    for group, _, copies, rows, columns in list_rank_shapes(arch, moe, expert_tp, ep):
        if group == "experts" and rows > 1:
            expert = expert.add_matrix(rows, columns)
            num_experts = copies
    return LayerProducts(*dense, *last, *expert, *replicated, num_experts)


class _MatrixSums(NamedTuple):
    """Sums over matrices."""

    weights: int = 0
    edges: int = 0
    unaligned: int = 0

    def add_matrix(self, rows: int, columns: int) -> _MatrixSums:
        """Return the sums with one more matrix."""
        return _MatrixSums(
            self.weights + rows * columns,
            self.edges + rows + columns,
            self.unaligned + count_unaligned(rows, columns),
        )


def count_adapter_products(arch: Architecture, moe: bool, adapters: Adapters, tp: int) -> Products:
    """Return the two low-rank matrices of each adapter of one layer."""
    products: Products = map_distinct(lambda tp: _list_adapter_products(arch, moe, adapters, tp), tp)
    return products


@lru_cache(maxsize=1024)
def _list_adapter_products(arch: Architecture, moe: bool, adapters: Adapters, tp: int) -> Products:
    targets, rank, _ = adapters
    weights = edges = 0
    for target, (out, inner) in arch.layer_linears(find_first_layer(arch, moe)):
        if target in targets:
            weights += ceil_div(rank * (out + inner), tp)
            edges += ceil_div(out + inner, tp) + 2 * rank
    return Products(weights, edges)


def count_dora_products(arch: Architecture, moe: bool, adapters: Adapters) -> tuple[int, int, int]:
    """Return multiplied pairs, their moved numbers, and the numbers of adapted matrices, of one layer.

    peft's DoRA multiplies both adapter matrices with the identity in each forward (peft 0.21,
    tuners/lora/dora.py, ``get_lora_weight``).
    """
    targets, rank, _ = adapters
    pairs = moved = matrices = 0
    for target, (out, inner) in arch.layer_linears(find_first_layer(arch, moe)):
        if target in targets:
            pairs += inner * rank * (inner + out)
            moved += inner * (inner + out) + rank * (3 * inner + out)
            matrices += inner * out
    return pairs, moved, matrices


def count_adapters(arch: Architecture, moe: bool, adapters: Adapters) -> int:
    """Return the number of adapters in one layer."""
    return sum(target in adapters.targets for target, _ in arch.layer_linears(find_first_layer(arch, moe)))


class AttentionKeys(NamedTuple):
    """Mean number of keys that attention multiplies each query with, by kind of layer."""

    full: float
    """Layers that attend to the whole sequence."""
    sliding: float
    """Layers with a sliding window."""


def count_attention_keys(arch: Architecture, modules: Modules) -> AttentionKeys:
    """Return the keys that the attention kernels multiply, of which a mask may hide some afterwards.

    Fused kernels skip the keys after each query, and FlashAttention those before a window. A mask makes them
    skip nothing: SDPA gets one for packed documents and for windows (transformers, masking_utils.py), and
    its kernels read it as numbers to add to the scores. Without a fused kernel nothing is skipped either.
    """
    seq_len = float(modules.seq_len)
    every = AttentionKeys(seq_len, seq_len)
    if is_unfused(arch, modules):
        return every
    if modules.kernels == "megatron":
        full_has_mask = window_has_mask = modules.masks_documents
    else:
        full_has_mask = passes_mask(arch, modules._replace(windowed=False))
        window_has_mask = passes_mask(arch, modules._replace(windowed=True))
    # The first ``window`` tokens attend to all tokens up to themselves, later ones to a full window.
    window = min(seq_len, float(arch.sliding_window or seq_len))
    return AttentionKeys(
        full=every.full if full_has_mask else seq_len / 2,
        sliding=every.sliding if window_has_mask else window - window * window / (2 * seq_len),
    )


@lru_cache(maxsize=1024)
def count_attention_flops_per_token(arch: Architecture, modules: Modules) -> float:
    """Return executed forward FLOPs per token of one layer's two attention matmuls, averaged over layers."""
    keys, sliding = count_attention_keys(arch, modules), arch.sliding_window_layers
    total = (arch.num_hidden_layers - sliding) * keys.full + sliding * keys.sliding
    return 2.0 * arch.num_attention_heads * _get_score_width(arch) * total / arch.num_hidden_layers


def count_attention_operands(arch: Architecture) -> int:
    """Return the elements per token of fused attention's queries, keys, values and result."""
    width = get_attention_widths(arch)
    return width.query + width.key + width.value + width.output


def _get_score_width(arch: Architecture) -> int:
    """Return the pairs multiplied for one query and key of one head: their score, and its value."""
    latent = arch.latent_attention
    return latent.qk_head_dim + latent.v_head_dim if latent else 2 * arch.head_dim


def count_eager_attention(arch: Architecture, seq_len: int, tokens: int, tp: int) -> tuple[float, float]:
    """Return multiplied pairs and moved numbers of eager attention: scores, and their product with values.

    Every key counts, masked or not; each head is a separate matmul.
    """
    width, heads = _get_score_width(arch), ceil_div(arch.num_attention_heads, tp)
    return tokens * heads * width * seq_len, tokens * 2 * heads * (width + seq_len)
