"""Small models of every family, for what their modules really keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardscope.core.architecture import Architecture, LatentAttention, MixtureOfExperts

SHAPE = {
    "hidden_size": 168,
    "intermediate_size": 232,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}
"""Widths that differ from each other, so that no tensor is taken for another."""

MOE = MixtureOfExperts(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96)
LATENT = LatentAttention(
    q_lora_rank=48, kv_lora_rank=40, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24
)
WINDOW = {"sliding_window": 16, "sliding_window_layers": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "mistral": {"head_dim": 32},
    "mistral with a window": {"head_dim": 32, **WINDOW},
    "qwen2": {"head_dim": 28, "attention_bias": True},
    "qwen3": {"head_dim": 32, "qk_norm": True},
    "gemma2": {
        "head_dim": 32,
        "norms_per_layer": 4,
        "tie_word_embeddings": True,
        **WINDOW,
    },
    "phi3": {"head_dim": 28},
    "phi3 with a window": {"head_dim": 28, **WINDOW},
    "phi3 with a window and all heads": {
        "head_dim": 28,
        "num_key_value_heads": 6,
        **WINDOW,
    },
    "mistral with a window and all heads": {
        "head_dim": 32,
        "num_key_value_heads": 6,
        **WINDOW,
    },
    "mixtral": {"head_dim": 32, "mixture_of_experts": replace(MOE, moe_intermediate_size=232)},
    "qwen3_moe": {"head_dim": 28, "qk_norm": True, "mixture_of_experts": MOE},
    "deepseek_v3": {
        "head_dim": 16,
        "num_key_value_heads": 6,
        "latent_attention": LATENT,
        "mixture_of_experts": replace(MOE, num_experts=24, shared_expert_intermediate_size=96),
    },
    "deepseek_v3 with equal heads": {
        "head_dim": 16,
        "num_key_value_heads": 6,
        "latent_attention": replace(LATENT, v_head_dim=48),
        "mixture_of_experts": replace(MOE, num_experts=24, shared_expert_intermediate_size=96),
    },
    "gpt2": {
        "hidden_size": 192,
        "head_dim": 32,
        "num_key_value_heads": 6,
        "norm": "layernorm",
        "gated_mlp": False,
        "position_embedding": "learned",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    },
}
PLAIN = {"norm": "layernorm", "gated_mlp": False}
BIAS = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
FAMILIES |= {
    "qwen2_moe": {
        "head_dim": 28,
        "attention_bias": True,
        "mixture_of_experts": replace(MOE, shared_expert_intermediate_size=104),
    },
    "gemma": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 32, "norms_per_layer": 4, "qk_norm": True, "tie_word_embeddings": True},
    "gemma3_text in windows": {
        "head_dim": 32,
        "norms_per_layer": 4,
        "qk_norm": True,
        "tie_word_embeddings": True,
        **WINDOW,
    },
    "phi": {"head_dim": 28, "norms_per_layer": 1, "parallel_residual": True, **PLAIN, **BIAS},
    "phi with normalised queries": {
        "head_dim": 28,
        "norms_per_layer": 1,
        "parallel_residual": True,
        "qk_norm": True,
        **PLAIN,
        **BIAS,
    },
    "deepseek_v2": {
        "head_dim": 16,
        "num_key_value_heads": 6,
        "latent_attention": LATENT,
        "mixture_of_experts": replace(MOE, num_experts=24, shared_expert_intermediate_size=192),
    },
    "deepseek_v2 with equal heads": {
        "head_dim": 16,
        "num_key_value_heads": 6,
        "latent_attention": replace(LATENT, v_head_dim=48),
        "mixture_of_experts": replace(MOE, num_experts=24, shared_expert_intermediate_size=192),
    },
    "deepseek_v2 with whole queries": {
        "head_dim": 16,
        "num_key_value_heads": 6,
        "latent_attention": replace(LATENT, q_lora_rank=None),
        "mixture_of_experts": replace(MOE, num_experts=24, shared_expert_intermediate_size=192),
    },
    "gpt_neox": {"head_dim": 28, "num_key_value_heads": 6, "parallel_residual": True, **PLAIN, **BIAS},
    "gpt_neox in sequence": {"head_dim": 28, "num_key_value_heads": 6, **PLAIN, **BIAS},
    "gpt_oss": {
        "head_dim": 32,
        "attention_bias": True,
        "attention_output_bias": True,
        **WINDOW,
        "mixture_of_experts": replace(MOE, moe_intermediate_size=232),
    },
    "olmo2": {"head_dim": 28, "qk_norm": True},
    "granite": {"head_dim": 28},
    "glm": {"head_dim": 32, "attention_bias": True},
    "glm4": {"head_dim": 32, "attention_bias": True, "norms_per_layer": 4},
    "glm4_moe": {
        "head_dim": 32,
        "attention_bias": True,
        "mixture_of_experts": replace(MOE, num_experts=24, shared_expert_intermediate_size=96),
    },
    "glm4_moe with normalized queries": {
        "head_dim": 32,
        "attention_bias": True,
        "qk_norm": True,
        "mixture_of_experts": replace(MOE, num_experts=24, shared_expert_intermediate_size=96),
    },
    "falcon of one key head": {
        "head_dim": 28,
        "num_key_value_heads": 1,
        "norms_per_layer": 1,
        "parallel_residual": True,
        **PLAIN,
    },
    "falcon of all heads": {"head_dim": 28, "num_key_value_heads": 6, **PLAIN, **BIAS},
    "falcon of groups": {
        "head_dim": 28,
        "new_decoder_architecture": True,
        "parallel_residual": True,
        **PLAIN,
    },
    "falcon of groups and one norm": {
        "head_dim": 28,
        "new_decoder_architecture": True,
        "parallel_residual": True,
        "norms_per_layer": 1,
        **PLAIN,
    },
    "starcoder2": {"head_dim": 28, **PLAIN, **BIAS},
    "starcoder2 with a window": {
        "head_dim": 28,
        **WINDOW,
        **PLAIN,
        **BIAS,
    },
    "nemotron": {"head_dim": 32, **PLAIN},
    "seed_oss": {"head_dim": 32, "attention_bias": True},
    "smollm3": {"head_dim": 32, "tie_word_embeddings": True},
    "ministral3": {"head_dim": 32, "tie_word_embeddings": True},
    "glm4_moe_lite": {
        "head_dim": 16,
        "num_key_value_heads": 6,
        "latent_attention": replace(LATENT, v_head_dim=48),
        "mixture_of_experts": replace(MOE, num_experts=24, shared_expert_intermediate_size=96),
    },
    "olmo3": {"head_dim": 28, "qk_norm": True},
    "olmo3 in windows": {"head_dim": 28, "qk_norm": True, **WINDOW},
}
ALL_WINDOWS = ("mistral", "phi3", "gemma3_text", "starcoder2", "olmo3")
"""Families of which every layer here has the window; the others' every other layer."""
NARROW_VALUES = {"deepseek_v3", "deepseek_v2", "deepseek_v2 with whole queries"}
"""DeepSeek's values are narrower than its keys, for which a CPU rank has no fused attention."""
SCALES_QUERIES = {"ministral3"}
"""Families whose layers also save a scale of queries: one number per position, which no formula counts."""


def architecture(family: str, num_layers: int) -> Architecture:
    """A model of ``num_layers`` layers, of the family that the name begins with."""
    fields = {**SHAPE, **FAMILIES[family]}
    if fields.get("sliding_window_layers"):
        fields["sliding_window_layers"] = num_layers if family.startswith(ALL_WINDOWS) else num_layers // 2
    model_type = family.split(" ")[0]
    return Architecture(name=family, model_type=model_type, num_hidden_layers=num_layers, **fields)
