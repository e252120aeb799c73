"""Differences between a user's script and the recipe, reported while it runs and not as errors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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


def compare_optimizer(recipe: Recipe, optimizer: torch.optim.Optimizer) -> str | None:
    """Describe an optimizer other than the recipe's; None if it is the recipe's or a subclass of it."""
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if names & set(CLASSES[recipe.optimizer]):
        return None
    return f"the optimizer {type(optimizer).__name__}, the plan's is {recipe.optimizer!r}"


def compare_batch(recipe: Recipe, shape: tuple[int, ...], *, num_slices: int) -> str | None:
    """Describe a first micro-batch of another ``shape``, [sequences, tokens]; None if it is the plan's.

    With context parallelism each of ``num_slices`` ranks may have a slice of the tokens.
    """
    sequences, tokens = shape
    planned = (recipe.micro_batch_size, recipe.seq_len)
    if (sequences, tokens) in (planned, (planned[0], planned[1] // num_slices)):
        return None
    return f"micro-batches of {sequences} x {tokens} tokens, the plan's are {planned[0]} x {planned[1]}"


def compare_recomputation(recipe: Recipe, recomputes: bool) -> str | None:
    """Describe other recomputation; ``recomputes``: whether ``torch.utils.checkpoint`` ran in step one."""
    if recomputes == (recipe.recompute != "none"):
        return None
    difference = "recomputation" if recomputes else "no recomputation"
    return f"{difference}, the plan's is {recipe.recompute!r}"


def compare_trained(recipe: Recipe, num_trained: int, num_parameters: int) -> str | None:
    """Describe a difference in what trains: all weights, or only some of them."""
    if recipe.has_adapters == (num_trained < num_parameters):
        return None
    return (
        f"{num_trained:,} of {num_parameters:,} parameters to train, the plan's method is {recipe.method!r}"
    )


def find_token_shape(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[int, ...] | None:
    """Return the shape [sequences, tokens] of the token ids among a model's arguments, or None."""
    import torch

    for value in (kwargs.get("input_ids"), *args):
        if isinstance(value, torch.Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32):
            return tuple(value.shape)
    return None
