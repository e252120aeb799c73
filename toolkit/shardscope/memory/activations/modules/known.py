"""Families whose saved tensors are listed in this folder; others raise ``ValueError``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.families.registry import FAMILIES

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

KNOWN = frozenset(FAMILIES)
"""Families tested tensor by tensor against transformers' modules (tests/runs/test_saved_tensors.py)."""


def check_known(arch: Architecture) -> None:
    """Raise ``ValueError`` if the saved tensors of the family's modules are not listed."""
    if arch.model_type not in KNOWN:
        refuse(
            "Architecture.model_type",
            arch.model_type,
            f"a family whose activations are known: {', '.join(sorted(KNOWN))}",
            "plan.rehearse(), which runs the family's own modules on fake tensors",
        )
    if arch.position_embedding == "alibi":
        refuse(
            "Architecture.position_embedding",
            "alibi",
            "rope or learned: what a mask of biases for each head takes is not known",
            "plan.rehearse(), which runs the family's own modules on fake tensors",
        )
