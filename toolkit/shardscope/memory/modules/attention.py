"""What the attention kernel itself saves: fused (flash, memory-efficient), masked, eager, plain math."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.memory.modules.saved import Modules, Saved
from shardscope.memory.precision import FP32

if TYPE_CHECKING:
    from shardscope.architecture import Architecture

EAGER = frozenset({"gemma2"})
"""Families that transformers runs without a fused kernel: scores are capped, which SDPA cannot do."""


class Widths(NamedTuple):
    """Numbers a token has on each side of the attention kernel."""

    query: int
    key: int
    value: int
    output: int

    @property
    def inputs(self) -> int:
        """Query, key and value."""
        return self.query + self.key + self.value


def widths(arch: Architecture) -> Widths:
    """Numbers of a token in the kernel's operands; with grouped queries keys and values are narrower."""
    heads, latent = arch.num_attention_heads, arch.latent_attention
    if latent is not None:
        # DeepSeek-V2, section 2.1: training expands keys and values to all heads.
        query = heads * latent.qk_head_dim
        return Widths(query, query, heads * latent.v_head_dim, heads * latent.v_head_dim)
    kv = arch.num_key_value_heads * arch.head_dim
    return Widths(heads * arch.head_dim, kv, kv, heads * arch.head_dim)


def slides(arch: Architecture, seq_len: int) -> bool:
    """Whether a sliding window is in force: transformers then passes a mask, and the kernel keeps it.

    Taken for all layers of a model that has any such layer: published ones have all or are eager.
    """
    return bool(arch.sliding_window_layers and arch.sliding_window and seq_len >= arch.sliding_window)


def scores_per_token(arch: Architecture, modules: Modules) -> int:
    """Bytes of attention scores that one query keeps, over all heads and keys; 0 with a fused kernel."""
    each_key = arch.num_attention_heads * modules.seq_len
    if modules.kernels == "megatron":
        return 0
    if arch.model_type in EAGER:
        # The cap's tanh, the fp32 softmax, and its cast for the product with the values.
        cast = modules.compute if modules.compute < FP32 else 0
        return each_key * (modules.compute + FP32 + cast)
    if _in_plain_math(arch, modules):
        # The fp32 softmax; with dropout also its mask and the product of both.
        return each_key * FP32 * (3 if arch.model_type == "gpt2" else 1)
    return 0


def kernel_tensors(arch: Architecture, modules: Modules, output_projection: str = "o_proj") -> list[Saved]:
    """The kernel's operands, statistics and output, and the output projection's input where it is a copy."""
    c, heads, width = modules.compute, arch.num_attention_heads, widths(arch)
    scores = scores_per_token(arch, modules)
    if scores:
        # Keys and values are repeated to all heads; plain math in half precision upcasts its operands.
        eager = arch.model_type in EAGER
        operands = (width.query + 2 * heads * arch.head_dim) * c if eager else width.inputs * FP32
        feeds = modules.inner_copies(output_projection) * width.output * c
        return [Saved("attention", operands + scores + feeds, "tp")]
    key, value = width.key, width.value
    masked = slides(arch, modules.seq_len)
    tensors = [Saved("attention", FP32 * heads, "tp")]
    if masked:
        # With a mask SDPA wants as many keys as queries, and keeps the mask in the operands' type.
        key = value = width.query
        tensors.append(Saved("attention", modules.seq_len * c, "whole"))
    elif arch.model_type == "phi3":
        # The values are a view of the fused projection's output, which so stays whole.
        value = width.query + 2 * width.key
    if arch.model_type == "gpt2":
        key = value = width.query
    latent = arch.latent_attention
    if latent is not None:
        value = heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    tensors.append(Saved("attention", (width.query + key + value + width.output) * c, "tp"))
    copied = modules.inner_copies(
        output_projection, already_saved=not _output_is_copied(arch, masked, modules)
    )
    if copied:
        tensors.append(Saved("attention", width.output * c, "tp"))
    return tensors


def _in_plain_math(arch: Architecture, modules: Modules) -> bool:
    """Whether a CPU rank has no fused kernel: dropout in attention, or values narrower than keys."""
    if modules.on_gpu:
        return False
    latent = arch.latent_attention
    return arch.model_type == "gpt2" or (latent is not None and latent.qk_head_dim != latent.v_head_dim)


def _output_is_copied(arch: Architecture, masked: bool, modules: Modules) -> bool:
    """Whether the output must be made contiguous for the projection.

    Flash attention lays its output out as the query is. Families that put the query together with ``cat``
    have it by heads, where the projection wants it by tokens; the memory-efficient kernel lays it by tokens.
    """
    latent = arch.latent_attention
    if latent is not None:
        return latent.qk_head_dim == latent.v_head_dim
    return arch.model_type == "phi3" and not (masked and modules.on_gpu)
