"""GLM-4 of 2024 (``glm``), of 2025 (``glm4``), GLM-4.5 (``glm4_moe``), GLM-4.7 Flash (``glm4_moe_lite``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardscope.core.errors import check_integer, refuse
from shardscope.families.common import Fields, HfConfig, read_bias, read_sizes
from shardscope.families.deepseek import add_layer_parts
from shardscope.families.family import Family, Names

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


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


def _read_glm4_moe_lite(config: HfConfig) -> Fields:
    """Read Glm4MoeLiteConfig: GLM-4.5's experts with DeepSeek-V3's latent attention, in layers of a list."""
    fields: Fields = {**read_sizes(config, kv_heads=None, positions=202_752), **read_bias(config)}
    # Defaults: transformers 5.24, configuration_glm4_moe_lite.py.
    experts = config.read_size("n_routed_experts", "num_local_experts", limit="num_experts", default=64)
    top_k = config.read_size("num_experts_per_tok", limit="num_experts", default=4)
    fields = add_layer_parts(
        config, fields, experts=experts, top_k=top_k, inner=1_536, shared=1, dense=1,
        latent_widths=(768, 192, 256),
    )  # fmt: skip
    # Files also have first_k_dense_replace, which the config class does not read.
    kinds = _read_mlp_kinds(config, fields["num_hidden_layers"])
    first = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    dense = [index for index, kind in enumerate(kinds) if kind == "dense" and index > first]
    replaced = {"first_k_dense_replace": first, "mlp_only_layers": dense}
    fields["mixture_of_experts"] = {**fields["mixture_of_experts"], **replaced}
    return fields


def _read_mlp_kinds(config: HfConfig, num_layers: int) -> list[str]:
    """Return "dense" or "sparse" of each layer: the first one is dense, unless the config has a list."""
    kinds = config.get("mlp_layer_types", default=["dense", *["sparse"] * (num_layers - 1)])
    names = kinds if isinstance(kinds, list | tuple) else ()
    if len(names) < num_layers or any(name not in ("dense", "sparse") for name in names):
        allowed = f"a list of 'dense' or 'sparse' for each of num_hidden_layers={num_layers} layers"
        refuse("config.json mlp_layer_types", kinds, allowed, "remove the key: only the first one is dense")
    return [str(kind) for kind in names[:num_layers]]


def _list_mlp_kinds(arch: Architecture) -> Mapping[str, object]:
    layers = range(arch.num_hidden_layers)
    return {"mlp_layer_types": ["sparse" if arch.is_moe_layer(index) else "dense" for index in layers]}


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

GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    read=_read_glm4_moe_lite,
    config_values=_list_mlp_kinds,
    supports=GLM4_MOE.supports,
    has_group_limited_routing=True,
    has_multi_token_prediction=True,
    router="sigmoid",
)
