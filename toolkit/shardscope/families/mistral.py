"""Mistral and Mixtral."""

from __future__ import annotations

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
