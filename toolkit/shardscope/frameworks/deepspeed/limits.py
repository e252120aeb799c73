"""What the DeepSpeed engine runs of what can be planned. No torch here: a kernel asks before it launches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.frameworks.limits import check_recipe
from shardscope.validation import refuse

if TYPE_CHECKING:
    from shardscope.plan import Plan


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` for what the engine cannot run."""
    check_recipe(plan.recipe)


def nvme_folder(layout: Any, run_folder: Path) -> Path:
    return run_folder / "nvme"
