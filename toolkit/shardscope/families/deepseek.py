"""DeepSeek-V2, V2-Lite and V3."""

from __future__ import annotations

from shardscope.core.errors import check_integer
from shardscope.families.common import Fields, HfConfig, check_even_heads, read_bias, read_sizes
from shardscope.families.family import Family


def _read_deepseek_v2(config: HfConfig) -> Fields:
    """Read DeepseekV2Config: latent attention and shared experts, as in V3, with a softmax router."""
    sizes = read_sizes(config, kv_heads=None, positions=2_048)
    check_even_heads(sizes)
    fields: Fields = {**sizes, **read_bias(config), "mlp_bias": config.read_flag("mlp_bias", False)}
    # DeepseekV2Config's own default is None, with which its router cannot select experts, so the key is
    # required.
    top_k = config.read_size("num_experts_per_tok", limit="num_experts")
    # Defaults: transformers 5.24, configuration_deepseek_v2.py.
    experts = _read_num_experts(config, "num_experts", default=64)
    return add_layer_parts(config, fields, experts=experts, top_k=top_k, inner=1_407, shared=2, dense=0)


def _read_deepseek_v3(config: HfConfig) -> Fields:
    """Read DeepseekV3Config: ``ForCausalLM`` lacks the multi-token-prediction module."""
    fields: Fields = {**read_sizes(config, kv_heads=None, positions=4_096), **read_bias(config)}
    top_k = config.read_size("num_experts_per_tok", limit="num_experts", default=8)
    # Defaults: transformers 5.24, configuration_deepseek_v3.py.
    experts = _read_num_experts(config, "num_local_experts", default=256)
    return add_layer_parts(config, fields, experts=experts, top_k=top_k, inner=2_048, shared=1, dense=3)


def _read_num_experts(config: HfConfig, alias: str, *, default: int) -> int:
    """Return the routed experts; ``alias`` is the other name of their key (``attribute_map``)."""
    return config.read_size("n_routed_experts", alias, limit="num_experts", default=default)


def add_layer_parts(
    config: HfConfig,
    fields: Fields,
    *,
    experts: int,
    top_k: int,
    inner: int,
    shared: int,
    dense: int,
    latent_widths: tuple[int, int, int] = (1_536, 128, 128),
) -> Fields:
    """Add latent attention and experts.

    The numbers are the family's defaults: ``inner`` width of an expert, ``shared`` experts, first layers
    without experts (``dense``), and the rank of queries with a head's widths without rotation and of values.
    """
    query_rank, plain_head_dim, value_head_dim = latent_widths
    inner = config.read_size("moe_intermediate_size", limit="moe_intermediate_size", default=inner)
    shared = check_integer(
        "config.json n_shared_experts", config.get("n_shared_experts", default=shared), low=0, high=1_024
    )
    rope_head_dim = config.read_size("qk_rope_head_dim", limit="head_dim", default=64)
    latent_attention = {
        # data.get instead of get: null means that queries are not compressed (V2-Lite).
        "q_lora_rank": config.data.get("q_lora_rank", query_rank),
        "kv_lora_rank": config.get("kv_lora_rank", default=512),
        "qk_nope_head_dim": config.get("qk_nope_head_dim", default=plain_head_dim),
        "qk_rope_head_dim": rope_head_dim,
        "v_head_dim": config.get("v_head_dim", default=value_head_dim),
    }
    first = config.get("first_k_dense_replace", default=dense)
    if isinstance(first, int) and not isinstance(first, bool):
        # A test model of at most three layers has no MoE layer.
        first = min(first, fields["num_hidden_layers"])
    fields["mixture_of_experts"] = {
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": inner,
        # All shared experts are one MLP of their joint width (modeling_deepseek_v3.py, DeepseekV3MoE).
        "shared_expert_intermediate_size": inner * shared,
        "first_k_dense_replace": first,
    }
    # The config classes set head_dim to the rotary part, whatever the file contains (__post_init__).
    return {**fields, "head_dim": rope_head_dim, "latent_attention": latent_attention}


DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    read=_read_deepseek_v2,
    supports=frozenset({"document_masks"}),
    router="softmax_upcast",
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    read=_read_deepseek_v3,
    supports=frozenset({"pipeline_stages", "document_masks"}),
    has_group_limited_routing=True,
    # ``num_mtp_layers`` is 1 by default; files have that layer's weights, modeling_deepseek_v3.py has no
    # module for them.
    has_multi_token_prediction=True,
    router="sigmoid",
)
