"""GLM-4 of 2024 (``glm``) and of 2025 (``glm4``), and GLM-4.5 with experts (``glm4_moe``)."""

from __future__ import annotations

from shardscope.core.errors import check_integer
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


def _read_glm4_moe(config: HfConfig) -> Fields:
    """Read Glm4MoeConfig: unfused layers with DeepSeek-V3's experts and router, but plain attention."""
    fields: Fields = {
        **read_sizes(config, kv_heads=8, positions=131_072),
        # As in GLM-4, the output projection has no bias.
        "attention_bias": config.read_flag("attention_bias", False),
        "qk_norm": config.read_flag("use_qk_norm", False),
    }
    # Defaults: transformers 5.24, configuration_glm4_moe.py.
    width = config.read_size("moe_intermediate_size", limit="moe_intermediate_size", default=1_408)
    shared = check_integer(
        "config.json n_shared_experts", config.get("n_shared_experts", default=1), low=0, high=1_024
    )
    first = config.get("first_k_dense_replace", default=1)
    if isinstance(first, int) and not isinstance(first, bool):
        first = min(first, fields["num_hidden_layers"])
    fields["mixture_of_experts"] = {
        "num_experts": config.read_size(
            "n_routed_experts", "num_local_experts", limit="num_experts", default=128
        ),
        "num_experts_per_tok": config.read_size("num_experts_per_tok", limit="num_experts", default=8),
        "moe_intermediate_size": width,
        # All shared experts are one MLP of their joint width (modeling_glm4_moe.py, Glm4MoeMoE).
        "shared_expert_intermediate_size": width * shared,
        "first_k_dense_replace": first,
    }
    return fields


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

GLM4_MOE = Family(
    model_type="glm4_moe",
    read=_read_glm4_moe,
    supports=frozenset({"pipeline_stages", "document_masks"}),
    concatenates_query=True,
    has_group_limited_routing=True,
    # Files have num_nextn_predict_layers more layers, which transformers does not load.
    has_multi_token_prediction=True,
    router="sigmoid",
)
