"""FLOPs, bytes and seconds of each matmul and of attention in one layer's forward, for one micro-batch.

The seconds are those of :mod:`shardscope.timing.layers`, matrix by matrix. Backward has two matmuls of the
same size for each (Kaplan et al. 2020, section 2.1), and so the same intensity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from shardscope.memory.activations.modules.attention import is_unfused
from shardscope.memory.state.stages import is_replicated, list_rank_shapes
from shardscope.timing.layers import HALF_PEAKS, PEAKS
from shardscope.timing.matmul import (
    count_attention_flops_per_token,
    count_attention_operands,
    count_eager_attention,
    count_unaligned,
)
from shardscope.timing.rates import MOVED_BYTES

if TYPE_CHECKING:
    from shardscope.timing.layers import LayerWork
    from shardscope.timing.rates import MatrixRate


class OperatorCost(NamedTuple):
    """Cost of one operator in forward."""

    name: str
    kind: Literal["matmul", "expert matmul", "attention"]
    flops: float
    num_bytes: float
    """Bytes of its operands and its result, each moved once."""
    seconds: float
    precision: str
    """The dtype whose peak bounds it."""


def list_layer_operators(work: LayerWork, moe: bool) -> list[OperatorCost]:
    """Return the matmuls of one layer, dense or with routed experts, and its core attention.

    Norms, activations and other memory-bound operators have no FLOPs worth counting and are left out.
    """
    arch, degrees, precision = work.arch, work.plan.degrees, PEAKS[work.plan.recipe.precision]
    tokens = float(work.tokens)
    costs: list[OperatorCost] = []
    for group, name, _, rows, columns in list_rank_shapes(arch, moe, degrees.tp, degrees.ep):
        if group != "experts" and columns > 1:
            multiplied = work.replicated_tokens if is_replicated(name) else tokens
            costs.append(_count_matmul(name, "matmul", rows, columns, 1, multiplied, work.rate, precision))
    if moe:
        routed, rate = work.count_routed_tokens(), work.get_expert_rate()
        for group, name, copies, rows, columns in list_rank_shapes(arch, moe, work.expert_tp, degrees.ep):
            if group == "experts" and rows > 1:
                cost = _count_matmul(
                    name, "expert matmul", rows, columns, copies, routed, rate, work.expert_precision
                )
                costs.append(cost)
    costs.append(_count_attention(work, moe))
    return costs


def _count_matmul(
    name: str,
    kind: Literal["matmul", "expert matmul"],
    rows: int,
    columns: int,
    copies: int,
    tokens: float,
    rate: MatrixRate,
    precision: str,
) -> OperatorCost:
    """Return the product of ``tokens`` inputs with a matrix, or with ``copies`` that share the tokens."""
    multiplied = tokens * rows * columns
    moved = copies * rows * columns + tokens * (rows + columns)
    seconds = rate.seconds(multiplied, moved, tokens * count_unaligned(rows, columns))
    module = name.removesuffix(".weight").rpartition(".")[2]
    return OperatorCost(module, kind, 2 * multiplied, MOVED_BYTES[precision] * moved, seconds, precision)


def _count_attention(work: LayerWork, moe: bool) -> OperatorCost:
    """Return core attention: its FLOPs, and queries, keys, values and outputs moved once.

    Eager and math attention write and read all scores (``timing/layers.py``).
    """
    arch, modules, recipe = work.arch, work.modules, work.plan.recipe
    tp, precision = work.plan.degrees.tp, HALF_PEAKS[recipe.precision]
    seconds = work.compute_layer(moe).forward_attention
    if is_unfused(arch, modules):
        pairs, moved = count_eager_attention(arch, recipe.seq_len, work.tokens, tp)
        return OperatorCost(
            "attention", "attention", 2 * pairs, MOVED_BYTES[precision] * moved, seconds, precision
        )
    flops = work.tokens * count_attention_flops_per_token(arch, modules) / tp
    moved = work.tokens * count_attention_operands(arch) / tp
    return OperatorCost("attention", "attention", flops, MOVED_BYTES[precision] * moved, seconds, precision)
