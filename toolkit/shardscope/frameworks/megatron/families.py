"""Rejection of families whose layers megatron-core's TransformerLayer cannot build."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.families.registry import find_family

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


def check_family(arch: Architecture) -> None:
    """Raise ``ValueError`` for an architecture that megatron-core would build as a different model."""
    why = find_family(arch).unlike_megatron_core
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
