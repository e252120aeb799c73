"""Attention written out, as megatron-core's own ``DotProductAttention`` does it, where it is fullest.

Followed line by line in megatron/core/transformer/dot_product_attention.py and fusions/fused_softmax.py, each
with its backward; "scores" are one number for each head, query and key. Beside the score buffer that is never
freed (``training_state.py``), the product of queries and keys stays to the end of the function's own forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.arrays.arithmetic import ceil_div
from shardscope.core.precision import FP32
from shardscope.memory.activations.modules.attention import widths
from shardscope.memory.activations.modules.megatron import repeats_heads

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.memory.activations.modules.saved import Modules


class Eager(NamedTuple):
    """Bytes for one token on one rank, of the core attention alone."""

    saved: int
    """Probabilities, masks, and what keys and values take more once repeated to all heads."""
    forward: int
    """At the fullest of forward: what it saves is part of it, and its output twice."""
    without_gradient: int
    """The same of a forward that saves nothing."""
    gradients: int
    """At the fullest of backward, beside what is saved: gradients of output and values are part of it."""
    recomputed: int
    """At the fullest of all, where it is a checkpoint of its own and played again for backward."""


def takes_plain_softmax(modules: Modules, rows: Any) -> Any:
    """Whether the fused softmax refuses ``rows`` (micro-batch x heads of a rank) of attention's scores.

    ``FusedScaleMaskSoftmax.is_kernel_available``.
    """
    if modules.attention != "eager":
        return False
    length = modules.seq_len
    if modules.compute == FP32 or not 16 < length <= 4096 or length % 4:
        return True
    return rows % 4 > 0


def eager_attention(arch: Architecture, modules: Modules, tp: int, plain_rows: int) -> Eager:
    """``plain_rows``: micro-batch x heads of a rank where the softmax is torch's own, else 0."""
    c, width = modules.compute, widths(arch)
    scores: int = ceil_div(arch.num_attention_heads * modules.seq_len, tp)
    product, full = scores * c, scores * FP32
    dropped = scores + product if modules.dropout else 0
    output: int = ceil_div(width.output * c, tp)
    repeated = more = 0
    if repeats_heads(arch, tp):
        repeated = 2 * output
        more = ceil_div(2 * (width.query - max(tp, arch.num_key_value_heads) * arch.head_dim) * c, tp)
    if plain_rows:
        # One mask for each call, in fp32 before it is one of booleans (transformer/utils.py,
        # get_default_causal_mask). In fp32 the product itself is masked, else a copy of it in fp32.
        mask: int = ceil_div(scores, plain_rows)
        copy, cast = (full, product) if c < FP32 else (0, 0)
        # Softmax keeps what it puts out; its cast stays where dropout does not make another of it.
        saved = full + mask + (dropped or cast)
        during = product + max(
            copy + 2 * FP32 * mask,
            copy + full + cast + mask,
            (full + mask + cast + dropped) if dropped else 0,
        )
        # Softmax keeps its output while it makes a gradient of one. In fp32 the mask goes into a view of the
        # product, whose gradient autograd copies as a whole, as a slice and out of it (CopySlices).
        softmax = (3 if cast else 4) * full + mask + output
    else:
        saved = product + dropped
        during, softmax = product + saved, 0
    # Backward of the product with the values, or of the softmax.
    backward = max(saved + product + 2 * output, softmax)
    forward = repeated + max(during, product + saved + 2 * output)
    return Eager(
        saved=saved + more,
        forward=forward,
        without_gradient=repeated + max(during, 2 * product + 2 * output),
        gradients=backward - saved,
        recomputed=max(forward, repeated + backward),
    )
