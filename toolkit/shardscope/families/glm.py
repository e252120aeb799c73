"""GLM-4 of 2024 (``glm``) and of 2025 (``glm4``)."""

from __future__ import annotations

from shardscope.families.common import Fields, HfConfig, read_sizes
from shardscope.families.family import Family, Names


def _read_glm(config: HfConfig) -> Fields:
    """Read GlmConfig: fused gate and up projections; biases of query, key and value by default."""
    # Defaults: transformers 5.24, configuration_glm.py. The output projection has no bias (GlmAttention).
    return {
        **read_sizes(config, kv_heads=2, positions=131_072),
        "attention_bias": config.read_flag("attention_bias", True),
        "head_dim": config.read_size("head_dim", limit="head_dim", default=128),
    }


def _read_glm4(config: HfConfig) -> Fields:
    """Read Glm4Config: GLM's layers with additional norms after attention and MLP."""
    return {**_read_glm(config), "norms_per_layer": 4}


GLM = Family(
    model_type="glm",
    read=_read_glm,
    supports=frozenset({"compiled_layers"}),
    may_have_experts=False,
    names=Names(fused_gate_up="gate_up_proj"),
    concatenates_query=True,
)

GLM4 = Family(
    model_type="glm4",
    read=_read_glm4,
    supports=frozenset({"compiled_layers"}),
    norms_per_layer=(4,),
    may_have_experts=False,
    names=Names(
        fused_gate_up="gate_up_proj",
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "post_self_attn_layernorm",
            "post_mlp_layernorm",
        ),
    ),
    # Glm4DecoderLayer registers post_attention_layernorm before post_self_attn_layernorm, but applies them in
    # the other order: index 2 runs after attention, index 1 before the MLP.
    norm_placement=((0,), (2, 1), (3,)),
    concatenates_query=True,
)
