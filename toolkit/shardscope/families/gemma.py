"""Gemma 1, 2 and 3 (its language model)."""

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
    reject_flag,
)
from shardscope.families.family import Family, Names

_BIDIRECTIONAL = "a causal decoder does not attend to later tokens"


def _read_gemma(config: HfConfig) -> Fields:
    """Read GemmaConfig: tied by default, head_dim defaults to 256."""
    reject_flag(config, "use_bidirectional_attention", _BIDIRECTIONAL)
    return _read_common(config, kv_heads=16, positions=8_192)


def _read_gemma2(config: HfConfig) -> Fields:
    """Read Gemma2Config: four norms per layer, tied by default, windows in layers 0, 2, 4, ..."""
    fields = _read_common(config, kv_heads=4, positions=8_192)
    check_even_heads(fields)
    fields["norms_per_layer"] = 4
    # Layer i has a window if i + 1 is odd (transformers 5.24, configuration_gemma2.py): half, rounded up.
    return read_window(config, fields, default=4_096, layers=lambda total: (total + 1) // 2)


def _read_gemma3_text(config: HfConfig) -> Fields:
    """Read Gemma3TextConfig: Gemma 2's norms, normalized queries and keys, no window in every 6th layer."""
    reject_flag(config, "use_bidirectional_attention", _BIDIRECTIONAL)
    # Gemma 3 4B's config.json on the Hub has neither heads nor a vocabulary, those of 12B and 27B have no
    # vocabulary: they are Gemma3TextConfig's defaults.
    fields = _read_common(config, kv_heads=4, positions=131_072, heads=8, vocabulary=262_208)
    check_even_heads(fields)
    fields |= {"norms_per_layer": 4, "qk_norm": True}
    # configuration_gemma3.py reads the pattern from the keyword ``sliding_window_pattern``, 6 by default:
    # every sixth layer has full attention. ``_sliding_window_pattern``, as it is stored, is not read again.
    pattern = check_integer(
        "config.json sliding_window_pattern",
        config.get("sliding_window_pattern", default=6),
        low=1,
        high=LIMITS["num_hidden_layers"][1],
    )
    return read_window(config, fields, default=4_096, layers=lambda total: total - total // pattern)


def _read_common(
    config: HfConfig,
    *,
    kv_heads: int,
    positions: int,
    heads: int | None = None,
    vocabulary: int | None = None,
) -> Fields:
    """Return the fields that all Gemma configs share: tied by default, and head_dim defaults to 256."""
    return {
        **read_sizes(config, kv_heads=kv_heads, positions=positions, heads=heads, vocabulary=vocabulary),
        **read_bias(config),
        "tie_word_embeddings": config.read_flag("tie_word_embeddings", True),
        "head_dim": config.read_size("head_dim", limit="head_dim", default=256),
    }


_FOUR_NORMS = Names(
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
)

GEMMA = Family(
    model_type="gemma",
    read=_read_gemma,
    supports=frozenset({
        "pipeline_stages", "fsdp2_tensor_parallel", "fsdp2_context_parallel", "autotp_rehearsal",
        "autotp_training", "compiled_layers", "document_masks",
    }),
    activation="gelu_pytorch_tanh",
    may_have_experts=False,
    # GemmaRMSNorm.forward multiplies by 1 + weight in fp32 and casts the product back
    # (huggingface/transformers#29402).
    scales_before_cast=True,
    has_own_embedding_class=True,
)  # fmt: skip

GEMMA2 = Family(
    model_type="gemma2",
    read=_read_gemma2,
    supports=frozenset({"pipeline_stages", "fsdp2_tensor_parallel", "autotp_rehearsal"}),
    activation="gelu_pytorch_tanh",
    norms_per_layer=(4,),
    names=_FOUR_NORMS,
    # modeling_gemma2.py: ``_supports_sdpa = False``, because SDPA has no softcapping.
    has_sdpa=False,
    has_softcapping=True,
    scales_before_cast=True,
    has_own_embedding_class=True,
)

GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    read=_read_gemma3_text,
    supports=frozenset({"fsdp2_tensor_parallel", "compiled_layers", "document_masks"}),
    activation="gelu_pytorch_tanh",
    norms_per_layer=(4,),
    may_have_experts=False,
    names=_FOUR_NORMS,
    scales_before_cast=True,
)
