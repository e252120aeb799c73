"""FLOPs and bytes of an operator from the shapes that the profiler recorded."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from shardscope.trace.arguments import ShapeArgs, read_shapes, read_texts

ELEMENT_BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "long": 8, "longint": 8, "int": 4, "short": 2,
    "shortint": 2, "char": 1, "signedchar": 1, "byte": 1, "unsignedchar": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "complexfloat": 8,
}  # fmt: skip
"""Bytes of an element by the profiler's, and NCCL's, name of its type in lower case without spaces."""

Shape = tuple[int, ...]


class Cost(NamedTuple):
    """Work of one call."""

    flops: float
    """0 for operators that only move bytes."""
    num_bytes: float
    """Operands read once and results written once: the minimum of memory traffic."""
    dtype: str


def find_element_bytes(dtype: str) -> int | None:
    """Return the bytes of one element; None for a type that is not known."""
    return ELEMENT_BYTES.get(dtype.lower().replace("c10::", "").replace(" ", ""))


def count_cost(name: str, args: ShapeArgs) -> Cost | None:
    """Return the cost of one call of an operator in :data:`COUNTED_OPERATORS`; None without shapes for it."""
    shapes, types = read_shapes(args), read_texts(args.types)
    if not shapes or len(types) != len(shapes):
        return None
    counted = (
        _FORMULAS[name](shapes, read_texts(args.values))
        if name in _FORMULAS
        else _count_pointwise(name, shapes)
    )
    if counted is None:
        return None
    flops, elements, operand = counted
    width = find_element_bytes(types[operand])
    return None if width is None else Cost(flops, elements * width, types[operand])


Counted = tuple[float, float, int]
"""FLOPs, elements moved, and the position of the operand whose type counts."""


def _count_matmul(a: Shape | None, b: Shape | None, operand: int) -> Counted | None:
    if (
        a is None
        or b is None
        or len(a) != len(b)
        or len(a) not in (2, 3)
        or a[-1] != b[-2]
        or a[:-2] != b[:-2]
    ):
        return None
    batch, (m, k), n = prod(a[:-2]), a[-2:], b[-1]
    return 2.0 * batch * m * k * n, float(batch * (m * k + k * n + m * n)), operand


def _count_attention(
    first: int, causal: int, scale: float
) -> Callable[[list[Shape | None], list[str]], Counted | None]:
    """Return the formula of attention with the query as input ``first`` and ``is_causal`` as ``causal``.

    Two products of ``batch * heads * queries * keys * width``, half of them if causal; ``scale`` is 2.5 for
    backward, which has five products (Dao 2023, FlashAttention-2, section 4.1).
    """

    def count(shapes: list[Shape | None], values: list[str]) -> Counted | None:
        query, key = [*shapes, None, None][first : first + 2]
        if query is None or key is None or len(query) != 4 or len(key) != 4 or len(values) <= causal:
            return None
        batch, heads, queries, width = query
        keys = key[2]
        share = 0.5 if values[causal] == "True" and queries == keys else 1.0
        elements = 2 * prod(query) + 2 * prod(key)
        return 4.0 * batch * heads * queries * keys * width * share * scale, float(elements) * scale, first

    return count


_FORMULAS: dict[str, Callable[[list[Shape | None], list[str]], Counted | None]] = {
    "aten::mm": lambda shapes, values: _count_matmul(*_select_operands(shapes, 0), 0),
    "aten::_scaled_mm": lambda shapes, values: _count_matmul(*_select_operands(shapes, 0), 0),
    "aten::bmm": lambda shapes, values: _count_matmul(*_select_operands(shapes, 0), 0),
    "aten::addmm": lambda shapes, values: _count_matmul(*_select_operands(shapes, 1), 1),
    "aten::baddbmm": lambda shapes, values: _count_matmul(*_select_operands(shapes, 1), 1),
    # Positions of is_causal: torch 2.13, native_functions.yaml.
    "aten::_scaled_dot_product_flash_attention": _count_attention(0, 4, 1.0),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _count_attention(0, 4, 1.0),
    "aten::_scaled_dot_product_efficient_attention": _count_attention(0, 6, 1.0),
    "aten::_scaled_dot_product_cudnn_attention": _count_attention(0, 6, 1.0),
    "aten::_scaled_dot_product_flash_attention_backward": _count_attention(1, 11, 2.5),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _count_attention(1, 7, 2.5),
    "aten::_scaled_dot_product_efficient_attention_backward": _count_attention(1, 11, 2.5),
}
_POINTWISE = frozenset(
    f"aten::{name}"
    for name in (
        "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "neg", "pow", "rsqrt", "sqrt", "exp",
        "gelu", "silu", "relu", "relu_", "sigmoid", "tanh", "gelu_backward", "silu_backward",
        "threshold_backward", "tanh_backward", "clamp_min", "clamp_min_", "copy_",
    )
)  # fmt: skip
COUNTED_OPERATORS = frozenset(_FORMULAS) | _POINTWISE
"""Operators with a formula."""


def _select_operands(shapes: list[Shape | None], first: int) -> tuple[Shape | None, Shape | None]:
    return (shapes[first], shapes[first + 1]) if len(shapes) > first + 1 else (None, None)


def _count_pointwise(name: str, shapes: list[Shape | None]) -> Counted | None:
    """Return the elements of all inputs and of one result of their broadcast shape."""
    # Scalars have the shape []: one element, negligible beside a tensor.
    tensors = [shape for shape in shapes if shape]
    if not tensors or shapes[0] is None:
        return None
    read = sum(prod(shape) for shape in tensors)
    if name == "aten::copy_":  # its inputs are the destination and the source
        return 0.0, float(read), 0
    rank = max(len(shape) for shape in tensors)
    padded = [(1,) * (rank - len(shape)) + shape for shape in tensors]
    written = prod(max(sizes) for sizes in zip(*padded, strict=True))
    return 0.0, float(read + written), 0
