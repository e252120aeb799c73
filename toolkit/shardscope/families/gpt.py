"""GPT-2, GPT-NeoX (Pythia) and gpt-oss."""

from __future__ import annotations

from shardscope.families.common import (
    Fields,
    HfConfig,
    check_even_heads,
    read_bias,
    read_sizes,
    read_window,
    reject_flag,
)
from shardscope.families.family import Family, FileNames, Names


def _read_gpt2(config: HfConfig) -> Fields:
    """Read GPT2Config: its own key names, fused Conv1D projections with bias, learned positions, tied."""
    reject_flag(config, "add_cross_attention", "a causal decoder has no cross-attention")
    hidden = config.read_size("n_embd", "hidden_size", limit="hidden_size")
    heads = config.read_size("n_head", "num_attention_heads", limit="num_attention_heads")
    check_even_heads({"hidden_size": hidden, "num_attention_heads": heads})
    # The old and the new key names are aliases (transformers 5.24, configuration_gpt2.py, attribute_map).
    return {
        "hidden_size": hidden,
        "intermediate_size": config.read_size("n_inner", limit="intermediate_size", default=4 * hidden),
        "num_hidden_layers": config.read_size("n_layer", "num_hidden_layers", limit="num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "vocab_size": config.read_size("vocab_size", limit="vocab_size"),
        "max_position_embeddings": config.read_size(
            "n_positions", "max_position_embeddings", limit="max_position_embeddings", default=1_024
        ),
        "tie_word_embeddings": config.read_flag("tie_word_embeddings", True),
        # transformers' Conv1D always has a bias (pytorch_utils.py).
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "gated_mlp": False,
        "norm": "layernorm",
        "position_embedding": "learned",
    }


def _read_gpt_neox(config: HfConfig) -> Fields:
    """Read GPTNeoXConfig: fused query, key and value with bias; a parallel residual by default."""
    fields = read_sizes(config, kv_heads=None, positions=2_048)
    check_even_heads(fields)
    heads = fields["num_attention_heads"]
    # GPTNeoXAttention has as many key/value heads as query heads and derives head_dim, so other keys for them
    # are ignored.
    return {
        **fields,
        **read_bias(config, default=True),
        "num_key_value_heads": heads,
        "head_dim": fields["hidden_size"] // heads,
        "mlp_bias": True,
        "gated_mlp": False,
        "norm": "layernorm",
        "parallel_residual": config.read_flag("use_parallel_residual", True),
    }


def _read_gpt_oss(config: HfConfig) -> Fields:
    """Read GptOssConfig: a sink per head, experts with biases in every layer, a window in every other."""
    fields: Fields = {**read_sizes(config, kv_heads=8, positions=131_072), **read_bias(config, default=True)}
    fields["head_dim"] = config.read_size("head_dim", limit="head_dim", default=64)
    fields["mixture_of_experts"] = {
        "num_experts": config.read_size("num_local_experts", "num_experts", limit="num_experts", default=128),
        "num_experts_per_tok": config.read_size("num_experts_per_tok", limit="num_experts", default=4),
        "moe_intermediate_size": fields["intermediate_size"],
    }
    # Layer i has a window if i + 1 is odd (configuration_gpt_oss.py): half, rounded up.
    return read_window(config, fields, default=128, layers=lambda total: (total + 1) // 2)


GPT2 = Family(
    model_type="gpt2",
    read=_read_gpt2,
    supports=frozenset({"fsdp2_context_parallel", "megatron_weights", "document_masks", "dropout"}),
    activation="gelu_new",
    activation_key="activation_function",
    may_have_experts=False,
    has_grouped_queries=False,
    heads_fill_width=True,
    names=Names(
        layers="transformer.h",
        embedding="transformer.wte",
        final_norm="transformer.ln_f",
        attention="attn",
        fused_qkv="c_attn",
        output="c_proj",
        up="c_fc",
        down="c_proj",
        norms=("ln_1", "ln_2"),
    ),
    projections="conv1d",
    has_dropout_modules=True,
    has_embedding_dropout=True,
)

GPT_NEOX = Family(
    model_type="gpt_neox",
    supports=frozenset({"document_masks"}),
    read=_read_gpt_neox,
    activation="gelu",
    parallel_residual=(True, False),
    may_have_experts=False,
    has_grouped_queries=False,
    heads_fill_width=True,
    names=Names(
        layers="gpt_neox.layers",
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        attention="attention",
        fused_qkv="query_key_value",
        output="dense",
        up="dense_h_to_4h",
        down="dense_4h_to_h",
    ),
    # conversion_mapping.py renames ``embed_out.`` of the files to ``lm_head.``.
    file_names=FileNames(renamed=("lm_head.", "embed_out.")),
    concatenates_query=True,
    # GPTNeoXAttention.forward splits query_key_value's output by ``chunk``, which returns views.
    values_are_views=True,
    has_dropout_modules=True,
    has_embedding_dropout=True,
)

GPT_OSS = Family(
    model_type="gpt_oss",
    read=_read_gpt_oss,
    unlike_megatron_core="a sink for each head, and experts with biases and clamps",
    names=Names(router="mlp.router"),
    file_names=FileNames(experts_are_stacked=True),
    has_attention_sinks=True,
    has_clamped_experts=True,
    has_expert_intermediate_size=False,
    router="softmax_of_top_k",
    # SDPA takes no sink: modeling_gpt_oss.py concatenates it to the scores before its softmax.
    has_sdpa=False,
    scales_before_cast=True,
)
