"""Mistral, Mixtral and Ministral 3."""

from __future__ import annotations

from collections.abc import Mapping

from shardscope.core.errors import refuse
from shardscope.families.common import Fields, HfConfig, read_sizes, read_window
from shardscope.families.family import LLAMA_SUPPORT, Family, FileNames


def _read_mistral(config: HfConfig) -> Fields:
    """Read MistralConfig: a window of 4096 tokens unless the key is null."""
    fields = read_sizes(config, kv_heads=8, positions=131_072)
    return read_window(config, fields, default=4_096, layers=lambda total: total)


def _read_mixtral(config: HfConfig) -> Fields:
    """Read MixtralConfig: ``intermediate_size`` is that of one expert; every layer is MoE."""
    fields = read_sizes(config, kv_heads=8, positions=131_072)
    fields["mixture_of_experts"] = {
        "num_experts": config.read_size("num_local_experts", "num_experts", limit="num_experts", default=8),
        "num_experts_per_tok": config.read_size("num_experts_per_tok", limit="num_experts", default=2),
        "moe_intermediate_size": fields["intermediate_size"],
    }
    # Unlike Mistral's, the window is off unless the file has one (configuration_mixtral.py).
    return read_window(config, fields, default=None, layers=lambda total: total)


def _read_ministral3(config: HfConfig) -> Fields:
    """Read Ministral3Config: Mistral's layers, whose queries are scaled by their position.

    A missing ``head_dim`` is 128; null divides hidden_size by the heads.
    """
    fields = read_sizes(config, kv_heads=8, positions=262_144)
    if "head_dim" not in config.data:
        fields["head_dim"] = 128
    _check_query_scale(config, fields["max_position_embeddings"])
    # The mask has a window in every layer or in none, whatever ``layer_types`` of the file are
    # (transformers 5.24, modeling_ministral3.py, Ministral3Model.forward).
    without_types = HfConfig({key: value for key, value in config.data.items() if key != "layer_types"})
    return read_window(without_types, fields, default=None, layers=lambda total: total)


def _check_query_scale(config: HfConfig, positions: int) -> None:
    """Raise ``ValueError`` for rotary settings without the scale of queries, which fails in the forward.

    Ministral3Attention multiplies by 1 + llama_4_scaling_beta x log(1 + position //
    original_max_position_embeddings), and has defaults for both only if the file has no rotary settings.
    """
    rotary = config.get("rope_parameters", "rope_scaling")
    if not isinstance(rotary, Mapping):
        return
    for key, neutral in (("llama_4_scaling_beta", 0.0), ("original_max_position_embeddings", positions)):
        if rotary.get(key) is None:
            allowed = "a number, by which Ministral 3 scales queries"
            fix = f"add {key!r}: {neutral}, with which queries are not scaled"
            refuse(f"config.json rope_parameters.{key}", None, allowed, fix)


MISTRAL = Family(
    model_type="mistral",
    read=_read_mistral,
    supports=LLAMA_SUPPORT,
    # configuration_mistral.py warns about ``layer_types`` and refers to the Ministral classes.
    model_type_with_layer_types="ministral",
)

MIXTRAL = Family(
    model_type="mixtral",
    read=_read_mixtral,
    supports=frozenset({
        "pipeline_stages", "fsdp2_context_parallel", "deepspeed_moe", "megatron_weights", "attention_choice",
        "document_masks", "dropout",
    }),
    normalizes_top_k=True,
    # conversion_mapping.py, "mixtral": the files' w1 and w3 become gate_up_proj, w2 becomes down_proj.
    file_names=FileNames(gate="w1", up="w3", down="w2", renamed=(".mlp.", ".block_sparse_moe.")),
    has_expert_intermediate_size=False,
    # deepspeed 0.19.8, runtime/zero/leaf_module_config.py, DEFAULT_LEAF_MODULE_CLASSES.
    is_zero3_leaf=True,
)  # fmt: skip

MINISTRAL3 = Family(
    model_type="ministral3",
    read=_read_ministral3,
    supports=LLAMA_SUPPORT - {"megatron_weights", "megatron_script", "liger_kernels"},
    may_have_experts=False,
    unlike_megatron_core="queries scaled by position",
)
