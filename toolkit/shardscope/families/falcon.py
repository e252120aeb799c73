"""Falcon and StarCoder 2."""

from __future__ import annotations

from shardscope.core.errors import Value, one_of, refuse
from shardscope.families.common import Fields, HfConfig, even_heads, sizes, window


def falcon(c: HfConfig) -> Fields:
    """FalconConfig: its own spelling, three layouts of heads, parallel halves behind one norm or two."""
    hidden, heads = c.size("hidden_size", "n_embed", limit="hidden_size"), "num_attention_heads"
    fields: Fields = {
        "hidden_size": hidden,
        "intermediate_size": c.size("ffn_hidden_size", limit="intermediate_size", default=4 * hidden),
        "num_hidden_layers": c.size("num_hidden_layers", limit="num_hidden_layers"),
        heads: c.size(heads, limit=heads),
        "vocab_size": c.size("vocab_size", limit="vocab_size"),
        "max_position_embeddings": c.size(
            "max_position_embeddings", limit="max_position_embeddings", default=2_048
        ),
        "tie_word_embeddings": c.flag("tie_word_embeddings", True),
        "position_embedding": "alibi" if c.flag("alibi", False) else "rope",
        "gated_mlp": False,
        "norm": "layernorm",
    }
    even_heads(fields)
    fields["head_dim"] = hidden // fields[heads]
    new, parallel = c.flag("new_decoder_architecture", False), c.flag("parallel_attn", True)
    if new and not parallel:
        refuse("config.json parallel_attn", False, "True with new_decoder_architecture", Value(True))
    every = c.size("num_kv_heads", limit="num_key_value_heads", default=fields[heads])
    shared = c.flag("multi_query", True) and not new
    if not new and not shared and every != fields[heads]:
        allowed = f"num_attention_heads={fields[heads]} without multi_query and new_decoder_architecture"
        refuse("config.json num_kv_heads", every, allowed, Value(fields[heads]))
    norms = 2
    if parallel:
        default = 2 if new else 1
        norms = one_of(
            "config.json num_ln_in_parallel_attn",
            c.get("num_ln_in_parallel_attn", default=default),
            (1, 2) if new else (1,),
        )
    has_bias = c.flag("bias", False)
    return {
        **fields,
        "num_key_value_heads": 1 if shared else every,
        "norms_per_layer": norms,
        "parallel_residual": parallel,
        "new_decoder_architecture": new,
        "attention_bias": has_bias,
        "attention_output_bias": has_bias,
        "mlp_bias": has_bias,
    }


def starcoder2(c: HfConfig) -> Fields:
    """Starcoder2Config: grouped queries, a plain MLP, and ``use_bias`` for all projections."""
    fields = sizes(c, kv_heads=2, positions=4_096)
    has_bias = c.flag("use_bias", True)
    fields |= {"attention_bias": has_bias, "attention_output_bias": has_bias, "mlp_bias": has_bias}
    fields |= {"gated_mlp": False, "norm": "layernorm"}
    fields["tie_word_embeddings"] = c.flag("tie_word_embeddings", True)
    return window(c, fields, default=None, layers=lambda total: total)
