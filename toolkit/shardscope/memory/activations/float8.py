"""Working memory of torchao's float8 training: casts to 8 bits during a matmul and its gradients.

Eager ``convert_to_float8_training`` with the default dynamic tensorwise scaling (torchao 0.18,
``float8_linear.py``). It saves inputs uncast, so layers save the same tensors as in bf16; each cast creates
an fp32 copy, a scaled copy and the 8-bit tensor. Checked in ``tests/runs/test_float8.py``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from shardscope.core.ops import maximum
from shardscope.core.precision import FP32, HALF
from shardscope.families.parameter_shapes import find_first_layer

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

CAST = 2 * FP32 + 1
"""Bytes per element during a cast."""


def compute_linear_working(tokens: int, out: int, inner: int) -> int:
    """Return the peak bytes of one Linear's backward, on top of its saved input and its output's gradient.

    The maximum of three points: the weight's cast, with the cast gradient; the second cast of the gradient,
    for the weight's gradient, with the input's gradient and the cast weight; and the cast of the input after
    that.
    """
    # Elements, and so bytes once they are cast to 8 bits.
    gradient, weight, saved_input = tokens * out, out * inner, tokens * inner
    casts = maximum(CAST * gradient + gradient, CAST * saved_input + 2 * gradient)
    return maximum(gradient + CAST * weight, HALF * saved_input + weight + casts)


def compute_layer_working(architecture: Architecture, moe: bool, tokens: int) -> int:
    """Return the maximum over one layer's Linears; fused experts stay in bf16."""
    return maximum(
        *(compute_linear_working(tokens, out, inner) for out, inner in _list_shapes(architecture, moe))
    )


@lru_cache(maxsize=1024)
def _list_shapes(architecture: Architecture, moe: bool) -> tuple[tuple[int, int], ...]:
    linears = architecture.layer_linears(find_first_layer(architecture, moe))
    return tuple(dict.fromkeys((out, inner) for _, (out, inner) in linears))
