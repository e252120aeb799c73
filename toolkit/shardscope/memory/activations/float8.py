"""torchao's float8 training: what casting to 8 bits takes while a matrix product and its gradients run.

Eager ``convert_to_float8_training`` with its default, dynamic scales of whole tensors (torchao 0.18,
``float8_linear.py``). It saves its inputs as they came, so what layers keep is what they keep in bf16; each
cast makes an fp32 copy, a scaled one and the 8-bit tensor. Counted in ``tests/runs/test_float8.py``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardscope.core.arrays.arithmetic import largest
from shardscope.core.precision import FP32, HALF
from shardscope.memory.state.lora import first_layer

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

CAST = 2 * FP32 + 1
"""Bytes for each number while it is cast."""


def linear_working(tokens: Any, out: Any, inner: Any) -> Any:
    """The most that backward of one Linear holds beside what it saved and the gradient that it was given.

    While the weight is cast beside the cast gradient; or, when the input's gradient and the weight's cast are
    there too, while the gradient is cast again for the weight's; or then the input.
    """
    gradient, weight, given = tokens * out, out * inner, tokens * inner
    last = HALF * given + weight + largest(CAST * gradient + gradient, CAST * given + 2 * gradient)
    return largest(gradient + CAST * weight, last)


def layer_working(architecture: Architecture, moe: bool, tokens: Any) -> Any:
    """The same of the Linear of one layer that needs most; fused experts are none and stay in bf16."""
    return largest(*(linear_working(tokens, out, inner) for out, inner in _shapes(architecture, moe)))


@lru_cache(maxsize=1024)
def _shapes(architecture: Architecture, moe: bool) -> tuple[tuple[int, int], ...]:
    linears = architecture.layer_linears(first_layer(architecture, moe))
    return tuple(dict.fromkeys((out, inner) for _, (out, inner) in linears))
