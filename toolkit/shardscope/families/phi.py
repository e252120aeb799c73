"""Phi 1, 1.5 and 2; Phi-3 and 4."""

from __future__ import annotations

from shardscope.core.errors import Value, refuse
from shardscope.families.common import Fields, HfConfig, read_sizes, read_window
from shardscope.families.family import Family, Names


def _read_phi(config: HfConfig) -> Fields:
    """Read PhiConfig: a parallel residual with one LayerNorm; biases everywhere, also in the head."""
    fields = read_sizes(config, kv_heads=None, positions=2_048)
    fields["qk_norm"] = config.read_flag("qk_layernorm", False)
    head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    # PhiAttention builds its q_layernorm and k_layernorm for hidden_size // num_attention_heads, so another
    # head_dim fails in forward.
    if fields["qk_norm"] and fields["head_dim"] != head_dim:
        allowed = f"hidden_size / num_attention_heads = {head_dim} with qk_layernorm (PhiAttention)"
        refuse("config.json head_dim", fields["head_dim"], allowed, Value(head_dim))
    return {
        **fields,
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "gated_mlp": False,
        "norm": "layernorm",
        "norms_per_layer": 1,
        "parallel_residual": True,
    }


def _read_phi3(config: HfConfig) -> Fields:
    """Read Phi3Config: fused projections, no biases."""
    fields = read_sizes(config, kv_heads=None, positions=4_096)
    return read_window(config, fields, default=None, layers=lambda total: total)


PHI = Family(
    model_type="phi",
    supports=frozenset({"document_masks"}),
    read=_read_phi,
    activation="gelu_new",
    norms_per_layer=(1,),
    parallel_residual=(True,),
    may_have_experts=False,
    names=Names(
        final_norm="model.final_layernorm",
        output="dense",
        up="fc1",
        down="fc2",
        query_key_norms=("q_layernorm", "k_layernorm"),
    ),
    # PhiForCausalLM: lm_head with bias=True, unlike those of the other families here.
    has_head_bias=True,
    concatenates_query=True,
    has_dropout_modules=True,
    has_embedding_dropout=True,
)

PHI3 = Family(
    model_type="phi3",
    read=_read_phi3,
    supports=frozenset({"pipeline_stages", "fsdp2_context_parallel", "document_masks"}),
    longrope_aliases=("su", "yarn"),
    may_have_experts=False,
    names=Names(fused_qkv="qkv_proj", fused_gate_up="gate_up_proj"),
    concatenates_query=True,
    # Phi3Attention.forward slices query, key and value out of qkv_proj's output.
    values_are_views=True,
    has_dropout_modules=True,
)
