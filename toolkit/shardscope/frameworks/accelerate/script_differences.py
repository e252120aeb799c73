"""What of a recipe a person's own script does otherwise: seen while it runs, said, and no error."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardscope.core.recipe import Recipe

ADAM = ("AdamW", "Adam", "FusedAdam", "DeepSpeedCPUAdam")
CLASSES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "adamw": ADAM,
    "adamw_foreach": ADAM,
    "adamw_8bit": ("AdamW8bit", "Adam8bit"),
    "paged_adamw": ("PagedAdamW", "PagedAdamW32bit", "PagedAdam", "PagedAdam32bit"),
    "paged_adamw_8bit": ("PagedAdamW8bit", "PagedAdam8bit"),
    "adafactor": ("Adafactor",),
    "sgd": ("SGD",),
    "lion": ("Lion",),
    "muon": ("Muon", "MuonWithAdamW"),
})  # fmt: skip
"""Recipe's optimizer -> names of the classes that keep such state."""


def of_optimizer(recipe: Recipe, optimizer: Any) -> str | None:
    """``optimizer`` is a ``torch.optim.Optimizer``; None where it is the recipe's, or a child of it."""
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if names & set(CLASSES[recipe.optimizer]):
        return None
    return f"the optimizer {type(optimizer).__name__}, the plan's is {recipe.optimizer!r}"


def of_batch(recipe: Recipe, shape: tuple[int, ...], *, cut: int) -> str | None:
    """``shape`` is ``[sequences, tokens]`` of the first micro-batch; ``cut`` ranks share a sequence."""
    sequences, tokens = shape
    planned = (recipe.micro_batch_size, recipe.seq_len)
    if (sequences, tokens) in (planned, (planned[0], planned[1] // cut)):
        return None
    return f"micro-batches of {sequences} x {tokens} tokens, the plan's are {planned[0]} x {planned[1]}"


def of_recomputation(recipe: Recipe, recomputes: bool) -> str | None:
    """``recomputes``: whether ``torch.utils.checkpoint`` was at work in the first step."""
    if recomputes == (recipe.recompute != "none"):
        return None
    has = "recomputation" if recomputes else "no recomputation"
    return f"{has}, the plan's is {recipe.recompute!r}"


def of_trained(recipe: Recipe, num_trained: int, num_parameters: int) -> str | None:
    """All weights, or some of them."""
    if recipe.has_adapters == (num_trained < num_parameters):
        return None
    return (
        f"{num_trained:,} of {num_parameters:,} parameters to train, the plan's method is {recipe.method!r}"
    )


def tokens_in(given: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[int, ...] | None:
    """``[sequences, tokens]``: the shape of the token ids among a model's arguments; None: there are none."""
    import torch

    values = [named.get("input_ids"), *given]
    for value in values:
        if isinstance(value, torch.Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32):
            return tuple(value.shape)
    return None
