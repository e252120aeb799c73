"""Megatron-core's layer with fused norms, flash attention and fused activations, without dropout.

Reduces to Korthikanti et al. 2022 for a GPT layer: their 34 s b h + 5 a s^2 b less the two dropout masks
(2 s b h) and with flash attention's statistics (4 a s b) for the scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.memory.modules.attention import widths
from shardscope.memory.modules.saved import Modules, Saved
from shardscope.memory.precision import FP32

if TYPE_CHECKING:
    from shardscope.architecture import Architecture


def megatron_layer(arch: Architecture, moe: bool, modules: Modules) -> list[Saved]:
    """Every tensor that the layer saves."""
    c, hidden, attention = modules.compute, arch.hidden_size, widths(arch)
    tensors = [
        # Two norms: each keeps its input; its output feeds a matrix product.
        Saved("norms", 4 * hidden * c, "sequence"),
        Saved("attention", (attention.query + attention.output) * c, "tp"),
        # Where tp exceeds the key/value heads, linear_qkv's output is gathered and each rank keeps one head
        # (megatron/core/transformer/attention.py, get_query_key_value_tensors).
        Saved(
            "attention",
            (attention.key + attention.value) * c,
            "tp" if arch.latent_attention else "key_value_heads",
        ),
        *_statistics(arch),
    ]
    latent = arch.latent_attention
    if latent is not None:
        ranks = (latent.q_lora_rank or 0) + latent.kv_lora_rank
        tensors.append(Saved("attention", 2 * ranks * c, "sequence"))
    if moe:
        return tensors + _experts(arch, c)
    # The fused activation keeps its input (both branches if gated), the second product its input.
    return [*tensors, Saved("mlp", (_branches(arch) + 1) * arch.intermediate_size * c, "tp")]


def megatron_selective(arch: Architecture, moe: bool, modules: Modules) -> list[Saved]:
    """Recomputing the core attention frees its statistics only, once flash attention has freed its scores.

    Its operands stay as the checkpoint's inputs, its output as the projection's (Korthikanti et al. 2022,
    section 5; Megatron-LM#1225).
    """
    statistics = _statistics(arch)
    return [tensor for tensor in megatron_layer(arch, moe, modules) if tensor not in statistics]


def _statistics(arch: Architecture) -> list[Saved]:
    return [Saved("attention", FP32 * arch.num_attention_heads, "tp")]


def _branches(arch: Architecture) -> int:
    return 2 if arch.gated_mlp else 1


def _experts(arch: Architecture, c: int) -> list[Saved]:
    """Tokens by expert, both products' inputs, and the router; tp cuts the experts, not their tokens."""
    experts = arch.mixture_of_experts
    assert experts is not None
    copies, top_k = _branches(arch) + 1, experts.num_experts_per_tok
    inner = top_k * experts.moe_intermediate_size + experts.shared_expert_intermediate_size
    return [
        Saved("experts", top_k * arch.hidden_size * c, "whole"),
        Saved("experts", copies * inner * c, "tp"),
        Saved("experts", 2 * FP32 * experts.num_experts, "sequence"),
    ]
