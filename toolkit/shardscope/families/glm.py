"""GLM-4 of 2024 (``glm``) and of 2025 (``glm4``)."""

from __future__ import annotations

from shardscope.families.common import Fields, HfConfig, sizes


def glm(c: HfConfig) -> Fields:
    """GlmConfig: gate and up projection are one matrix; query, key and value have biases."""
    fields = {**sizes(c, kv_heads=2, positions=131_072), "attention_bias": c.flag("attention_bias", True)}
    fields["head_dim"] = c.size("head_dim", limit="head_dim", default=128)
    return fields


def glm4(c: HfConfig) -> Fields:
    """Glm4Config: GLM's layers with a norm after each half as well."""
    return {**glm(c), "norms_per_layer": 4}
