"""What the DDP engine runs of what can be planned: every layout, for its only degree is the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.frameworks.limits import PACKED_TRAINED, check_compiler, check_recipe

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


DDP_TRAINED = {**PACKED_TRAINED, "kernels": (None, "transformers", "compiled")}
"""What the engine trains of a recipe."""


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` for what the engine cannot run."""
    check_recipe(plan.recipe, DDP_TRAINED)
    check_compiler(plan)
