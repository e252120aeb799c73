"""What all engines over plain PyTorch ask of a recipe. No torch here: a kernel asks before it launches."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from shardscope.validation import refuse

if TYPE_CHECKING:
    from shardscope.recipe import Recipe


def check_adapters(recipe: Recipe) -> None:
    """Raise ``ValueError`` with the pip line if adapters are to be trained and peft is not installed."""
    if recipe.method == "lora" and importlib.util.find_spec("peft") is None:
        refuse(
            "Recipe.method",
            recipe.method,
            "'full', or 'lora' once peft, through which adapters train, is installed",
            'pip install "shardscope[train]"',
        )
