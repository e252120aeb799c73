"""Mistral and Mixtral."""

from __future__ import annotations

from shardscope.families.common import Fields, HfConfig, sizes, window


def mistral(c: HfConfig) -> Fields:
    """MistralConfig: a window of 4096 unless the key says null."""
    fields = sizes(c, kv_heads=8, positions=131_072)
    return window(c, fields, default=4_096, layers=lambda total: total)


def mixtral(c: HfConfig) -> Fields:
    """MixtralConfig: ``intermediate_size`` is that of one expert; every layer is MoE."""
    fields = sizes(c, kv_heads=8, positions=131_072)
    fields["mixture_of_experts"] = {
        "num_experts": c.size("num_local_experts", "num_experts", limit="num_experts", default=8),
        "num_experts_per_tok": c.size("num_experts_per_tok", limit="num_experts", default=2),
        "moe_intermediate_size": fields["intermediate_size"],
    }
    return window(c, fields, default=None, layers=lambda total: total)
