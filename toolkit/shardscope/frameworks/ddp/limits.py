"""Limits of the DDP engine: planned recipes that it cannot run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.frameworks.limits import QUANTIZED_TRAINED, check_compiler, check_recipe

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


DDP_TRAINED = {**QUANTIZED_TRAINED, "kernels": (None, "transformers", "compiled")}
"""Supported recipe values by field."""


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` for plans that the engine cannot run."""
    check_recipe(plan.recipe, DDP_TRAINED)
    check_compiler(plan)
