"""Llama and similar decoders: Granite, OLMo 2 and 3, Nemotron, Seed-OSS, SmolLM3."""

from __future__ import annotations

from shardscope.core.errors import check_integer
from shardscope.core.size_limits import LIMITS
from shardscope.families.common import (
    Fields,
    HfConfig,
    check_even_heads,
    read_bias,
    read_sizes,
    read_window,
)
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


def _read_olmo3(config: HfConfig) -> Fields:
    """Read Olmo3Config: OLMo 2's layers, with a window of 4096 tokens in all but every fourth."""
    return read_window(config, _read_olmo2(config), default=4_096, layers=lambda total: total - total // 4)


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


def _read_smollm3(config: HfConfig) -> Fields:
    """Read SmolLM3Config: Llama's layers, tied by default, without rotary embedding in every fourth.

    Those layers save no other tensors: query and key are the projections' outputs instead of rotated copies.
    """
    fields: Fields = {
        **read_sizes(config, kv_heads=4, positions=32_768),
        **read_bias(config),
        "mlp_bias": config.read_flag("mlp_bias", False),
        "tie_word_embeddings": config.read_flag("tie_word_embeddings", True),
    }

    def count_windows(total: int) -> int:
        # Without layer_types, only the layers without rotary embedding have a window: those with a 0 in
        # no_rope_layers (transformers 5.24, configuration_smollm3.py, __post_init__).
        if not config.read_flag("use_sliding_window", False):
            return 0
        rotates = config.get("no_rope_layers")
        if isinstance(rotates, list | tuple):
            return sum(not rotated for rotated in rotates[:total])
        interval = config.get("no_rope_layer_interval", default=4)
        most = LIMITS["num_hidden_layers"][1]
        return total // check_integer("config.json no_rope_layer_interval", interval, low=1, high=most)

    return read_window(config, fields, default=None, layers=count_windows)


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

SMOLLM3 = Family(
    model_type="smollm3",
    read=_read_smollm3,
    supports=LLAMA_SUPPORT - {"megatron_weights", "megatron_script", "liger_kernels"},
    may_have_experts=False,
    unlike_megatron_core="layers without rotary embedding, and so without a formula",
)

OLMO3 = Family(
    model_type="olmo3",
    read=_read_olmo3,
    supports=frozenset({
        "pipeline_stages", "fsdp2_context_parallel", "compiled_layers", "dora", "attention_choice",
        "document_masks", "dropout",
    }),
    may_have_experts=False,
    unlike_megatron_core=OLMO2.unlike_megatron_core,
    # Olmo3DecoderLayer and Olmo3Attention are OLMo 2's, but for the window (modular_olmo3.py).
    names=OLMO2.names,
    norm_placement=OLMO2.norm_placement,
    qk_norm_over_all_heads=True,
    scales_before_cast=True,
)  # fmt: skip
