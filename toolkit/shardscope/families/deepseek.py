"""DeepSeek-V2, V2-Lite and V3."""

from __future__ import annotations

from shardscope.core.errors import whole_number
from shardscope.families.common import Fields, HfConfig, bias, even_heads, sizes
from shardscope.families.family import Family


def _read_deepseek_v2(c: HfConfig) -> Fields:
    """Read DeepseekV2Config: latent attention and shared experts, as in V3, with a softmax router."""
    fields = {**even_heads(sizes(c, kv_heads=None, positions=2_048)), **bias(c)}
    fields["mlp_bias"] = c.flag("mlp_bias", False)
    chosen = c.size("num_experts_per_tok", limit="num_experts")
    return _latent(c, fields, experts=64, chosen=chosen, inner=1_407, shared=2, dense=0)


def _read_deepseek_v3(c: HfConfig) -> Fields:
    """Read DeepseekV3Config: ``ForCausalLM`` lacks the multi-token-prediction module."""
    fields = {**sizes(c, kv_heads=None, positions=4_096), **bias(c)}
    chosen = c.size("num_experts_per_tok", limit="num_experts", default=8)
    return _latent(c, fields, experts=256, chosen=chosen, inner=2_048, shared=1, dense=3)


def _latent(
    c: HfConfig, fields: Fields, *, experts: int, chosen: int, inner: int, shared: int, dense: int
) -> Fields:
    """Add latent attention and experts; the numeric arguments are the family's defaults."""
    inner = c.size("moe_intermediate_size", limit="moe_intermediate_size", default=inner)
    shared = c.get("n_shared_experts", default=shared)
    shared = whole_number("config.json n_shared_experts", shared, low=0, high=1_024)
    latent = {
        "q_lora_rank": c.data.get("q_lora_rank", 1_536),
        "kv_lora_rank": c.get("kv_lora_rank", default=512),
        "qk_nope_head_dim": c.get("qk_nope_head_dim", default=128),
        "qk_rope_head_dim": c.size("qk_rope_head_dim", limit="head_dim", default=64),
        "v_head_dim": c.get("v_head_dim", default=128),
    }
    first = c.get("first_k_dense_replace", default=dense)
    if isinstance(first, int) and not isinstance(first, bool):
        # A test model of at most three layers has no MoE layer.
        first = min(first, fields["num_hidden_layers"])
    fields["mixture_of_experts"] = {
        "num_experts": c.size("n_routed_experts", "num_local_experts", limit="num_experts", default=experts),
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner * shared,
        "first_k_dense_replace": first,
    }
    return {**fields, "head_dim": latent["qk_rope_head_dim"], "latent_attention": latent}


DEEPSEEK_V2 = Family(model_type="deepseek_v2", read=_read_deepseek_v2, router="softmax_upcast")

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    read=_read_deepseek_v3,
    supports=frozenset({"pipeline_stages"}),
    has_group_limited_routing=True,
    has_multi_token_prediction=True,
    router="sigmoid",
)
