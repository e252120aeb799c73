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
    return read_window(config, fields, default=None, layers=lambda total: total)


MISTRAL = Family(
    model_type="mistral",
    read=_read_mistral,
    supports=LLAMA_SUPPORT,
    model_type_with_layer_types="ministral",
)

MIXTRAL = Family(
    model_type="mixtral",
    read=_read_mixtral,
    supports=frozenset({
        "pipeline_stages", "fsdp2_context_parallel", "deepspeed_moe", "megatron_weights", "attention_choice",
        "dropout",
    }),
    normalizes_top_k=True,
    file_names=FileNames(gate="w1", up="w3", down="w2", renamed=(".mlp.", ".block_sparse_moe.")),
    has_expert_intermediate_size=False,
    is_zero3_leaf=True,
)  # fmt: skip
