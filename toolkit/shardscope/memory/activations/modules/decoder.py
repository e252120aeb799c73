"""An RMSNorm layer of the transformers library: Llama, Granite, Mistral, Qwen, Gemma, Phi-3, GLM, OLMo 2,
DeepSeek, gpt-oss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.precision import FP32
from shardscope.families.registry import family_of
from shardscope.memory.activations.modules.attention import get_attention_widths, list_kernel_tensors
from shardscope.memory.activations.modules.experts import list_expert_tensors
from shardscope.memory.activations.modules.saved import Modules, SavedTensor, list_stream_readers

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


def list_decoder_tensors(arch: Architecture, moe: bool, modules: Modules) -> list[SavedTensor]:
    """Return every tensor that the layer saves."""
    c, hidden = modules.compute, arch.hidden_size
    attention_readers, mlp_readers = list_stream_readers(arch)
    tensors = [
        SavedTensor("norms", _compute_norms(arch, modules), "sequence"),
        SavedTensor("norms", modules.stream_copies(*attention_readers) * hidden * c, "whole"),
        *list_kernel_tensors(arch, modules),
        *list_query_key_norms(arch, modules),
        *list_latent_tensors(arch, modules),
    ]
    if moe:
        return tensors + list_expert_tensors(arch, modules)
    tensors.append(SavedTensor("norms", modules.stream_copies(*mlp_readers) * hidden * c, "whole"))
    tensors.append(SavedTensor("mlp", count_mlp_copies(arch, modules) * arch.intermediate_size * c, "tp"))
    return tensors


def count_mlp_copies(arch: Architecture, modules: Modules) -> int:
    """Return how many intermediate-size tensors the MLP saves.

    Gate, silu(gate) and up, or the activation's input; and the product.
    """
    return (3 if arch.gated_mlp else 1) + modules.inner_copies("down_proj")


def _compute_norms(arch: Architecture, modules: Modules) -> int:
    """Return bytes saved by RMSNorms: fp32 input, 1/rms and, for the weight's gradient, normalized input."""
    hidden, count = arch.hidden_size, arch.norms_per_layer
    saved = count * (hidden * FP32 + FP32)
    if not modules.trained:
        return saved
    if family_of(arch).scales_before_cast:
        return saved + count * hidden * FP32
    # Norms after a projection (GLM-4) cast back to its output's dtype.
    behind = count - 2 if count > 2 else 0
    return saved + hidden * ((count - behind) * modules.stream + behind * modules.compute)


def list_query_key_norms(arch: Architecture, modules: Modules) -> list[SavedTensor]:
    """Return the tensors saved by query and key norms, if the family has them."""
    if not arch.qk_norm:
        return []
    width, heads = get_attention_widths(arch), arch.num_attention_heads + arch.num_key_value_heads
    normed = FP32 if family_of(arch).scales_before_cast else modules.compute
    saved = (width.query + width.key) * (FP32 + normed * modules.trained)
    norms = 2 if family_of(arch).qk_norm_over_all_heads else heads
    return [SavedTensor("attention", saved + FP32 * norms, "tp")]


def list_latent_tensors(arch: Architecture, modules: Modules) -> list[SavedTensor]:
    """Return DeepSeek's compressed query and key-value: each normalized, then projected up."""
    if arch.latent_attention is None:
        return []
    c, saved = modules.compute, 0
    ranks = (
        (arch.latent_attention.q_lora_rank, "q_b_proj"),
        (arch.latent_attention.kv_lora_rank, "kv_b_proj"),
    )
    for rank, projection in ranks:
        if rank:
            normed = c * modules.trained + c * modules.inner_copies(projection)
            saved += rank * (FP32 + normed) + FP32
    return [SavedTensor("attention", saved, "sequence")]
