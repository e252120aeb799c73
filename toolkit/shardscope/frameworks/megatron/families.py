"""Families whose layers megatron-core's TransformerLayer does not have: refused, never taken for a GPT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.errors import refuse

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

OTHER_LAYERS = {
    "olmo2": "norms behind attention and MLP, and one for all query heads together",
    "gpt_oss": "a sink for each head, and experts with biases and clamps",
    "qwen2_moe": "a gate before its shared expert",
}
"""What a family has that megatron-core 0.16's GPT layers do not, or that no formula here counts."""


def check_family(arch: Architecture) -> None:
    """Raise ``ValueError`` for an architecture that megatron-core would build as another one."""
    why = OTHER_LAYERS.get(arch.model_type)
    if arch.parallel_residual:
        why = "attention and MLP side by side"
    if arch.position_embedding == "alibi":
        why = "biases for each head in the place of positions"
    if why is not None:
        refuse(
            "Architecture.model_type",
            arch.model_type,
            f"a family of sequential pre-norm layers with Megatron: this one has {why}",
            {"layout": "fsdp2"},
        )
