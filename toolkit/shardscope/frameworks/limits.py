"""What all engines over plain PyTorch ask of a recipe. No torch here: a kernel asks before it launches."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardscope.validation import refuse

if TYPE_CHECKING:
    from shardscope.recipe import Recipe


def check_adapters(recipe: Recipe) -> None:
    """Raise ``ValueError`` with the pip line if adapters are to be trained and peft is not installed."""
    if recipe.has_adapters and importlib.util.find_spec("peft") is None:
        refuse(
            "Recipe.method",
            recipe.method,
            "'full', or 'lora' once peft, through which adapters train, is installed",
            'pip install "shardscope[train]"',
        )


TRAINED = {
    "method": ("full", "lora"),
    "quantization": (None,),
    "precision": ("bf16-mixed", "fp16-mixed", "bf16", "fp32"),
    "optimizer": ("adamw", "sgd"),
    "kernels": (None, "transformers"),
    "attention": (None,),
    "loss": (None, "full"),
    "dropout": (0.0,),
    "lora_dropout": (0.0,),
    "packing": (False,),
}
"""What the engines over plain PyTorch run of a recipe. What they do not is planned only, so that a run never
is another than its plan. How unevenly experts are loaded is what a run finds out, not what it is told."""


def check_recipe(recipe: Recipe, trained: Mapping[str, tuple[object, ...]] = TRAINED) -> None:
    """Raise ``ValueError`` for the first field of ``recipe`` that these engines do not train yet."""
    for field, values in trained.items():
        value = getattr(recipe, field)
        if value not in values:
            refuse(
                f"Recipe.{field}",
                value,
                f"{_listed(values)} to train: others can be planned, and no engine here runs them yet",
                f"{field}={values[0]!r}",
            )
    check_adapters(recipe)


def _listed(values: tuple[object, ...]) -> str:
    return ", ".join(map(repr, values))
