"""Differences between a user's script and the recipe, reported while it runs and not as errors."""

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
"""``Recipe.optimizer`` -> names of the classes with the same state."""


def of_optimizer(recipe: Recipe, optimizer: Any) -> str | None:
    """Describe an optimizer other than the recipe's; None if it is the recipe's or a subclass of it."""
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if names & set(CLASSES[recipe.optimizer]):
        return None
    return f"the optimizer {type(optimizer).__name__}, the plan's is {recipe.optimizer!r}"


def of_batch(recipe: Recipe, shape: tuple[int, ...], *, cut: int) -> str | None:
    """Describe a first micro-batch of another ``shape`` [sequences, tokens], sharded over ``cut`` ranks."""
    sequences, tokens = shape
    planned = (recipe.micro_batch_size, recipe.seq_len)
    if (sequences, tokens) in (planned, (planned[0], planned[1] // cut)):
        return None
    return f"micro-batches of {sequences} x {tokens} tokens, the plan's are {planned[0]} x {planned[1]}"


def of_recomputation(recipe: Recipe, recomputes: bool) -> str | None:
    """Describe other recomputation; ``recomputes``: whether ``torch.utils.checkpoint`` ran in step one."""
    if recomputes == (recipe.recompute != "none"):
        return None
    has = "recomputation" if recomputes else "no recomputation"
    return f"{has}, the plan's is {recipe.recompute!r}"


def of_trained(recipe: Recipe, num_trained: int, num_parameters: int) -> str | None:
    """Describe a difference in what trains: all weights, or only some of them."""
    if recipe.has_adapters == (num_trained < num_parameters):
        return None
    return (
        f"{num_trained:,} of {num_parameters:,} parameters to train, the plan's method is {recipe.method!r}"
    )


def tokens_in(given: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape [sequences, tokens] of the token ids among a model's arguments, or None."""
    import torch

    values = [named.get("input_ids"), *given]
    for value in values:
        if isinstance(value, torch.Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32):
            return tuple(value.shape)
    return None
