"""Falcon and StarCoder 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.errors import Value, check_choice, refuse
from shardscope.families.common import Fields, HfConfig, check_even_heads, read_sizes, read_window
from shardscope.families.family import Family, Names

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


def _read_falcon(config: HfConfig) -> Fields:
    """Read FalconConfig: its own key names, three head layouts, a parallel residual with one or two norms."""
    hidden = config.read_size("hidden_size", "n_embed", limit="hidden_size")
    heads = config.read_size("num_attention_heads", limit="num_attention_heads")
    # Key names and defaults: transformers 5.24, configuration_falcon.py; ``n_embed`` is an old name.
    fields: Fields = {
        "hidden_size": hidden,
        "intermediate_size": config.read_size(
            "ffn_hidden_size", limit="intermediate_size", default=4 * hidden
        ),
        "num_hidden_layers": config.read_size("num_hidden_layers", limit="num_hidden_layers"),
        "num_attention_heads": heads,
        "vocab_size": config.read_size("vocab_size", limit="vocab_size"),
        "max_position_embeddings": config.read_size(
            "max_position_embeddings", limit="max_position_embeddings", default=2_048
        ),
        "tie_word_embeddings": config.read_flag("tie_word_embeddings", True),
        "position_embedding": "alibi" if config.read_flag("alibi", False) else "rope",
        "gated_mlp": False,
        "norm": "layernorm",
    }
    check_even_heads(fields)
    is_new = config.read_flag("new_decoder_architecture", False)
    is_parallel = _read_flag(config, "parallel_attn")
    # FalconDecoderLayer.forward of the new architecture computes the MLP's input only with a parallel
    # residual.
    if is_new and not is_parallel:
        refuse("config.json parallel_attn", False, "True with new_decoder_architecture", Value(True))
    # FalconAttention: one key and value head with multi_query, num_kv_heads in the new architecture, and
    # otherwise one for each query head.
    kv_heads = config.read_size("num_kv_heads", limit="num_key_value_heads", default=heads)
    is_multi_query = _read_flag(config, "multi_query") and not is_new
    if not is_new and not is_multi_query and kv_heads != heads:
        allowed = f"num_attention_heads={heads} without multi_query and new_decoder_architecture"
        refuse("config.json num_kv_heads", kv_heads, allowed, Value(heads))
    # FalconDecoderLayer.__init__: the new architecture has two parallel norms by default, and an older one
    # with a parallel residual only input_layernorm, because its forward reads no other.
    norms = 2
    if is_parallel:
        default = 2 if is_new else 1
        norms = check_choice(
            "config.json num_ln_in_parallel_attn",
            config.get("num_ln_in_parallel_attn", default=default),
            (1, 2) if is_new else (1,),
        )
    # One flag sets the biases of all four projections: FalconLinear(bias=config.bias).
    has_bias = config.read_flag("bias", False)
    return {
        **fields,
        "head_dim": hidden // heads,
        "num_key_value_heads": 1 if is_multi_query else kv_heads,
        "norms_per_layer": norms,
        "parallel_residual": is_parallel,
        "new_decoder_architecture": is_new,
        "attention_bias": has_bias,
        "attention_output_bias": has_bias,
        "mlp_bias": has_bias,
    }


def _read_flag(config: HfConfig, key: str) -> bool:
    """Return a flag that is on without its key, but off if it is null (``bool | None`` in FalconConfig)."""
    return config.read_flag(key, default=key not in config.data)


def _read_starcoder2(config: HfConfig) -> Fields:
    """Read Starcoder2Config: grouped queries, an MLP without gate, ``use_bias`` for all projections."""
    fields = read_sizes(config, kv_heads=2, positions=4_096)
    has_bias = config.read_flag("use_bias", True)
    fields |= {"attention_bias": has_bias, "attention_output_bias": has_bias, "mlp_bias": has_bias}
    fields |= {"gated_mlp": False, "norm": "layernorm"}
    fields["tie_word_embeddings"] = config.read_flag("tie_word_embeddings", True)
    return read_window(config, fields, default=None, layers=lambda total: total)


def _check_falcon(arch: Architecture) -> None:
    """Raise ``ValueError`` for head and norm counts that FalconDecoderLayer cannot have."""
    kv_heads = arch.num_key_value_heads
    if arch.new_decoder_architecture:
        check_choice(
            "Architecture.parallel_residual of a new_decoder_architecture", arch.parallel_residual, (True,)
        )
        return
    if kv_heads not in (1, arch.num_attention_heads):
        allowed = f"1 or num_attention_heads={arch.num_attention_heads} without new_decoder_architecture"
        refuse("Architecture.num_key_value_heads", kv_heads, allowed, {"num_key_value_heads": 1})
    norms = 1 if arch.parallel_residual else 2
    check_choice("Architecture.norms_per_layer of an older falcon", arch.norms_per_layer, (norms,))


def _read_falcon_config(arch: Architecture) -> dict[str, object]:
    values: dict[str, object] = {
        "multi_query": arch.num_key_value_heads == 1,
        "alibi": arch.position_embedding == "alibi",
    }
    if arch.new_decoder_architecture:
        values["num_ln_in_parallel_attn"] = arch.norms_per_layer
    return values


FALCON = Family(
    model_type="falcon",
    read=_read_falcon,
    activation="gelu",
    config_values=_read_falcon_config,
    norms_per_layer=(1, 2),
    parallel_residual=(True, False),
    position_embeddings=("rope", "alibi"),
    may_have_experts=False,
    heads_fill_width=True,
    has_new_decoder_architecture=True,
    check=_check_falcon,
    names=Names(  # BLOOM's
        layers="transformer.h",
        embedding="transformer.word_embeddings",
        final_norm="transformer.ln_f",
        attention="self_attention",
        fused_qkv="query_key_value",
        output="dense",
        up="dense_h_to_4h",
        down="dense_4h_to_h",
        parallel_norms=("ln_attn", "ln_mlp"),
    ),
    # FalconLinear.forward is input @ weight.T plus the bias, not torch.nn.functional.linear.
    projections="matmul",
    # FalconModel.forward: create_causal_mask(allow_is_causal_skip=False), so that ALiBi can be added.
    always_passes_mask=True,
    # FalconAttention._split_heads: broadcast_to the shape of the queries.
    expands_key_heads=True,
)

STARCODER2 = Family(
    model_type="starcoder2",
    read=_read_starcoder2,
    supports=frozenset(
        {
            "pipeline_stages",
            "fsdp2_tensor_parallel",
            "fsdp2_context_parallel",
            "document_masks",
        }
    ),
    activation="gelu_pytorch_tanh",
    may_have_experts=False,
    names=Names(up="c_fc", down="c_proj"),
)
