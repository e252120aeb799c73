"""Llama and similar decoders: Granite, OLMo 2, Nemotron, Seed-OSS."""

from __future__ import annotations

from shardscope.families.common import Fields, HfConfig, check_even_heads, read_bias, read_sizes
from shardscope.families.family import LLAMA_SUPPORT, Family, Names


def _read_llama(config: HfConfig) -> Fields:
    """Read LlamaConfig: Llama 1 to 3.3 and other models with the same layers."""
    fields = read_sizes(config, kv_heads=None, positions=2_048)
    check_even_heads(fields)
    return {**fields, **read_bias(config), "mlp_bias": config.read_flag("mlp_bias", False)}


def _read_granite(config: HfConfig) -> Fields:
    """Read GraniteConfig: Llama's layers with constant scale factors."""
    fields = read_sizes(config, kv_heads=None, positions=2_048)
    return {**fields, **read_bias(config), "mlp_bias": config.read_flag("mlp_bias", False)}


def _read_olmo2(config: HfConfig) -> Fields:
    """Read Olmo2Config: norms after attention and MLP, and one norm over all query and all key heads."""
    return {**read_sizes(config, kv_heads=None, positions=2_048), **read_bias(config), "qk_norm": True}


def _read_nemotron(config: HfConfig) -> Fields:
    """Read NemotronConfig: LayerNorm1P, and an MLP without gate with a squared ReLU."""
    # configuration_nemotron.py does not replace a missing num_key_value_heads; NemotronAttention divides by
    # it.
    config.read_size("num_key_value_heads", limit="num_key_value_heads")
    return {
        **read_sizes(config, kv_heads=None, positions=4_096),
        **read_bias(config),
        "mlp_bias": config.read_flag("mlp_bias", False),
        "gated_mlp": False,
        "norm": "layernorm",
    }


def _read_seed_oss(config: HfConfig) -> Fields:
    """Read SeedOssConfig: Llama's layers; the output projection's bias has a flag of its own.

    A missing ``head_dim`` is 128; null divides hidden_size by the heads.
    """
    fields: Fields = {
        **read_sizes(config, kv_heads=8, positions=524_288),
        "attention_bias": config.read_flag("attention_bias", True),
        "attention_output_bias": config.read_flag("attention_out_bias", False),
        "mlp_bias": config.read_flag("mlp_bias", False),
    }
    if "head_dim" not in config.data:
        fields["head_dim"] = 128
    return fields


LLAMA = Family(model_type="llama", read=_read_llama, supports=LLAMA_SUPPORT)

GRANITE = Family(
    model_type="granite",
    read=_read_granite,
    supports=frozenset({
        "pipeline_stages", "fsdp2_tensor_parallel", "fsdp2_context_parallel", "autotp_rehearsal",
        "autotp_training", "compiled_layers", "document_masks",
    }),
    may_have_experts=False,
)  # fmt: skip

OLMO2 = Family(
    model_type="olmo2",
    read=_read_olmo2,
    supports=frozenset({"pipeline_stages", "fsdp2_context_parallel", "compiled_layers", "document_masks"}),
    may_have_experts=False,
    unlike_megatron_core="norms behind attention and MLP, and one for all query heads together",
    names=Names(norms=("post_attention_layernorm", "post_feedforward_layernorm")),
    # Olmo2DecoderLayer applies both norms to the outputs, before they are added to the residual.
    norm_placement=((), (0,), (1,)),
    # Olmo2Attention: q_norm and k_norm span all heads of the projection's output.
    qk_norm_over_all_heads=True,
    scales_before_cast=True,
)

NEMOTRON = Family(
    model_type="nemotron",
    supports=frozenset({"document_masks"}),
    read=_read_nemotron,
    activation="relu2",
    may_have_experts=False,
    concatenates_query=True,
    # NemotronLayerNorm1P.forward: layer_norm with ``weight + 1.0``.
    has_layernorm_1p=True,
)

SEED_OSS = Family(
    model_type="seed_oss",
    read=_read_seed_oss,
    # Without "dropout": residual_dropout adds masks after attention and MLP, which have no formula.
    supports=frozenset({
        "pipeline_stages", "fsdp2_tensor_parallel", "fsdp2_context_parallel", "compiled_layers", "dora",
        "attention_choice", "document_masks",
    }),
    may_have_experts=False,
)  # fmt: skip
