"""Bytes per weight by precision and role (master weight, compute, reduction)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardscope.core.recipe import Recipe

FP32 = 4
HALF = 2


class Widths(NamedTuple):
    """Bytes per number in each role."""

    original: int
    """Master weights, which the optimizer updates."""
    compute: int
    """Inputs of matmuls, and activations."""
    reduce: int
    """Gradients in reductions."""


widths: dict[str, Widths] = {
    "bf16-mixed": Widths(FP32, HALF, FP32),
    "fp16-mixed": Widths(FP32, HALF, FP32),
    # fp8 exists inside matmuls only: torchao 0.18's Float8Linear keeps its weight in high precision and casts
    # it in each forward (torchao/float8/float8_linear.py).
    "fp8-mixed": Widths(FP32, HALF, FP32),
    "bf16": Widths(HALF, HALF, HALF),
    "fp32": Widths(FP32, FP32, FP32),
}


def get_base_width(recipe: Recipe) -> int:
    """Return the bytes of one stored weight of the base model.

    With adapters the base is frozen, so mixed precision keeps only the compute copy and no fp32 master
    weights. peft's adapters are in fp32 (``autocast_adapter_dtype``).
    """
    width = widths[recipe.precision]
    return width.compute if recipe.has_adapters else width.original


num_moments: dict[str, int] = {"adamw": 2, "sgd": 1}
"""Optimizer states per weight: AdamW's two moments (Loshchilov & Hutter 2019), SGD's momentum."""
