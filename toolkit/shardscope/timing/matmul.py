"""What the matrix products of one layer multiply and move on one rank, summed over its matrices.

A product of m x k by k x n multiplies m k n pairs of numbers and moves m k + k n + m n. Of all matrices of a
layer, with m tokens, that is m W and W + m E, where W are their weights and E the sum of k + n. Where k or n
is no multiple of :data:`ALIGNED` matrix units are slower, by how much is the machine's.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.arrays.arithmetic import ceil_div, looked_up
from shardscope.families.parameter_names import names_of
from shardscope.memory.state.lora import adapter_targets, first_layer
from shardscope.memory.state.stages import rank_shapes

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.recipe import Recipe
    from shardscope.timing.rates import MatrixRate


ALIGNED = 64
"""Numbers of two bytes in 128 bytes: multiples of it are "most efficient" on A100 and later (NVIDIA's Matrix
Multiplication Background user guide, table 1)."""


def unaligned(rows: int, columns: int) -> int:
    """Weights of one matrix if either edge on the rank misses the multiple, else 0."""
    return rows * columns if rows % ALIGNED or columns % ALIGNED else 0


class Products(NamedTuple):
    """Matrices that the same tokens meet."""

    weights: Any
    """Their numbers."""
    edges: Any
    """Rows and columns of all of them."""
    unaligned: Any = 0
    """Their numbers in matrices of which an edge misses the multiple."""
    num_copies: Any = 1
    """Experts that share the tokens out."""

    def seconds(self, tokens: Any, rate: MatrixRate) -> Any:
        """One product with each for ``tokens`` tokens, of all copies together."""
        moved = self.num_copies * self.weights + tokens * self.edges
        return rate.seconds(tokens * self.weights, moved, tokens * self.unaligned)


class LayerProducts(NamedTuple):
    """The matrices of one decoder layer on one rank."""

    weights: Any
    edges: Any
    unaligned: Any
    last_weights: Any
    """The last product's, where nothing behind it saves a tensor: recomputation may stop before it."""
    last_edges: Any
    last_unaligned: Any
    expert_weights: Any
    """One routed expert's."""
    expert_edges: Any
    expert_unaligned: Any
    num_experts: Any
    """Routed experts on the rank."""

    @property
    def dense(self) -> Products:
        """All but routed experts."""
        return Products(self.weights, self.edges, self.unaligned)

    @property
    def last(self) -> Products:
        """The last product."""
        return Products(self.last_weights, self.last_edges, self.last_unaligned)

    @property
    def experts(self) -> Products:
        """Routed experts."""
        return Products(self.expert_weights, self.expert_edges, self.expert_unaligned, self.num_experts)


def layer_products(arch: Architecture, moe: bool, tp: Any, ep: Any, expert_tp: Any) -> LayerProducts:
    """One layer's, dense or with routed experts; arrays of degrees give arrays."""
    found: LayerProducts = looked_up(partial(_layer_products, arch, moe), tp, ep, expert_tp)
    return found


@lru_cache(maxsize=4096)
def _layer_products(arch: Architecture, moe: bool, tp: int, ep: int, expert_tp: int) -> LayerProducts:
    dense = last = expert = _Edges()
    num_experts = 0
    down = names_of(arch).down
    for group, name, _, rows, columns in rank_shapes(arch, moe, tp, ep):
        if group == "experts" or columns == 1:
            continue
        dense = dense.joined(rows, columns)
        if down in name and not moe and arch.norms_per_layer <= 2:
            last = _Edges().joined(rows, columns)
    for group, _, copies, rows, columns in rank_shapes(arch, moe, expert_tp, ep):
        if group == "experts" and rows > 1:
            expert = expert.joined(rows, columns)
            num_experts = copies
    return LayerProducts(*dense, *last, *expert, num_experts)


class _Edges(NamedTuple):
    """Sums over matrices."""

    weights: int = 0
    edges: int = 0
    unaligned: int = 0

    def joined(self, rows: int, columns: int) -> _Edges:
        """With one matrix more."""
        return _Edges(
            self.weights + rows * columns,
            self.edges + rows + columns,
            self.unaligned + unaligned(rows, columns),
        )


def adapter_products(arch: Architecture, moe: bool, recipe: Recipe, tp: Any) -> Products:
    """The two narrow matrices of each adapter of one layer."""
    found: Products = looked_up(lambda tp: _adapter_products(arch, moe, recipe, tp), tp)
    return found


@lru_cache(maxsize=1024)
def _adapter_products(arch: Architecture, moe: bool, recipe: Recipe, tp: int) -> Products:
    rank, targets = recipe.adapter_rank, adapter_targets(arch, recipe)
    weights = edges = 0
    for target, (out, inner) in arch.layer_linears(first_layer(arch, moe)):
        if target in targets:
            weights += ceil_div(rank * (out + inner), tp)
            edges += ceil_div(out + inner, tp) + 2 * rank
    return Products(weights, edges)


def count_adapters(arch: Architecture, moe: bool, recipe: Recipe) -> int:
    """Adapters of one layer."""
    targets = adapter_targets(arch, recipe)
    return sum(target in targets for target, _ in arch.layer_linears(first_layer(arch, moe)))


@lru_cache(maxsize=1024)
def attention_per_token(arch: Architecture, seq_len: int) -> float:
    """Forward FLOPs of attention's two products, causal, for one token in one layer, the mean of all.

    A third of forward and backward in :meth:`Architecture.flops_per_token`.
    """
    flops = arch.flops_per_token(seq_len) - 6.0 * arch.matrix_parameters_per_token
    return flops / 3 / arch.num_hidden_layers


def plain_attention(arch: Architecture, seq_len: int, tokens: Any, tp: Any) -> tuple[Any, Any]:
    """Pairs multiplied and numbers moved by scores and their product with values, where attention is written
    out: every key, masked or not, in a product of its own for each head.
    """
    latent = arch.latent_attention
    width = latent.qk_head_dim + latent.v_head_dim if latent else 2 * arch.head_dim
    heads = ceil_div(arch.num_attention_heads, tp)
    return tokens * heads * width * seq_len, tokens * 2 * heads * (width + seq_len)
