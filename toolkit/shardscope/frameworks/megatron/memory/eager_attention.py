"""Memory of eager attention in megatron-core's ``DotProductAttention``.

Follows megatron/core/transformer/dot_product_attention.py and fusions/fused_softmax.py line by line, forward
and backward. "Scores" have one element for each head, query and key. The score buffer that is never freed is
counted in ``training_state.py``; the product of queries and keys lives until the function's forward returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import ceil_div
from shardscope.core.precision import FP32
from shardscope.memory.activations.modules.attention import get_attention_widths
from shardscope.memory.activations.modules.megatron import repeats_heads

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.memory.activations.modules.saved_tensors import Modules


class EagerAttention(NamedTuple):
    """Bytes per token of the core attention on one rank."""

    saved: int
    """Probabilities, masks, and the extra bytes of keys and values repeated to all heads."""
    forward: int
    """Forward peak, with the saved tensors and two copies of the output."""
    without_gradient: int
    """Forward peak under ``no_grad``."""
    gradients: int
    """Backward peak in addition to the saved tensors, with the gradients of output and values."""
    recomputed: int
    """Peak of recomputation and backward, where the core attention is checkpointed (``core_attn``)."""


def takes_plain_softmax(modules: Modules, rows: int) -> bool:
    """Return whether eager attention falls back to torch's softmax because the fused kernel is not available.

    ``rows``: micro-batch size x heads of a rank. Source: ``FusedScaleMaskSoftmax.is_kernel_available``.
    """
    if modules.attention != "eager":
        return False
    length = modules.seq_len
    if modules.compute == FP32 or not 16 < length <= 4096 or length % 4:
        return True
    return rows % 4 > 0


def _count_freed_projection(arch: Architecture, modules: Modules, tp: int) -> int:
    """Return the bytes per token of the fused projection's output if only the values are views of it.

    Rotary embedding copies queries and keys; norms save the views that they read.
    """
    if arch.latent_attention is not None or repeats_heads(arch, tp):
        return 0
    if arch.position_embedding != "rope" or arch.qk_norm:
        return 0
    width = get_attention_widths(arch)
    return ceil_div((width.query + width.key + width.value) * modules.compute, tp)


def compute_eager_attention(arch: Architecture, modules: Modules, tp: int, plain_rows: int) -> EagerAttention:
    """Compute the bytes per token of eager attention on one rank.

    ``plain_rows``: micro-batch size x heads of a rank where the softmax is torch's, else 0.
    """
    c, width = modules.compute, get_attention_widths(arch)
    scores: int = ceil_div(arch.num_attention_heads * modules.seq_len, tp)
    product, full = scores * c, scores * FP32
    dropped = scores + product if modules.dropout else 0
    output: int = ceil_div(width.output * c, tp)
    # Keys and values are repeated to all heads (repeat_interleave): copies that autograd saves.
    repeated = repeated_saved = 0
    if repeats_heads(arch, tp):
        repeated = 2 * output
        repeated_saved = ceil_div(
            2 * (width.query - max(tp, arch.num_key_value_heads) * arch.head_dim) * c, tp
        )
    if plain_rows:
        # Each call builds one mask, first in fp32, then as booleans (transformer/utils.py,
        # get_default_causal_mask). In fp32 the product itself is masked, otherwise its fp32 copy.
        mask: int = ceil_div(scores, plain_rows)
        copy, cast = (full, product) if c < FP32 else (0, 0)
        # Softmax saves its output. The cast of it is saved too, unless dropout replaces it.
        saved = full + mask + (dropped or cast)
        during = product + max(
            copy + 2 * FP32 * mask,
            copy + full + cast + mask,
            (full + mask + cast + dropped) if dropped else 0,
        )
        # Softmax backward holds its output, the incoming and the new gradient. In fp32 the mask is written
        # in place into a view of the product, and autograd's CopySlices copies the gradient once more.
        softmax = (3 if cast else 4) * full + mask + output
    else:
        saved = product + dropped
        during, softmax = product + saved, 0
    # Two peak candidates: the backward of the matmul with the values, and that of the softmax. Between them
    # the whole projection is freed, if it was alive for its view of the values alone; a checkpoint keeps it.
    values = saved + product + 2 * output
    backward = max(values, softmax - _count_freed_projection(arch, modules, tp))
    forward = repeated + max(during, product + saved + 2 * output)
    return EagerAttention(
        saved=saved + repeated_saved,
        forward=forward,
        without_gradient=repeated + max(during, 2 * product + 2 * output),
        gradients=backward - saved,
        recomputed=max(forward, repeated + max(values, softmax)),
    )
