"""Bytes of one weight, by precision and by who keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardscope.core.recipe import Recipe

FP32 = 4
HALF = 2


class Widths(NamedTuple):
    """Bytes a number takes in each role."""

    original: int
    """The copy that the optimizer updates."""
    compute: int
    """What matrix products read, and so what activations are."""
    reduce: int
    """What gradients are reduced in."""


widths: dict[str, Widths] = {
    "bf16-mixed": Widths(FP32, HALF, FP32),
    "fp16-mixed": Widths(FP32, HALF, FP32),
    "fp8-mixed": Widths(FP32, HALF, FP32),
    "bf16": Widths(HALF, HALF, HALF),
    "fp32": Widths(FP32, FP32, FP32),
}


def base_width(recipe: Recipe) -> int:
    """Bytes of one weight of the model itself where it is kept.

    Under adapters it is frozen: it never updates, so mixed precision keeps no fp32 original of it, only what
    products read. peft's adapters are the ones in fp32 (``autocast_adapter_dtype``).
    """
    width = widths[recipe.precision]
    return width.compute if recipe.has_adapters else width.original


num_moments: dict[str, int] = {"adamw": 2, "sgd": 1}
"""Numbers that the optimizer keeps a weight: AdamW's two moments (Loshchilov & Hutter 2019), one momentum."""
