"""A column type for batch evaluation: each distinct value is computed once for all plans that share it.

A search evaluates hundreds of thousands of plans, and most quantities depend on few of their options: a
layer's weights on tp alone, its activations on tp and the micro-batch size. A :class:`Column` stores one
value for each distinct row of the keys that it depends on. Arithmetic between two columns runs over the
distinct rows of both. This is numpy's broadcasting over axes, restricted to the combinations that occur.

Results are cached: the same operation on the same columns returns the same column object. Plans that differ
only in recomputation, for example, share the seconds of their matmuls. This is value numbering (Cocke 1970):
a column is identified by its operation and its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.core.ops import Array
from shardscope.prediction.batch.deduplicate import encode_values

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.prediction.batch.rows import Rows


_numbers = count()


class Column(Array):
    """One number for each distinct row of some keys, usable like a number in formulas that broadcast.

    ``keys`` is a bit mask of the keys of ``rows`` that the values depend on. ``number`` is a unique id.
    """

    __slots__ = ("keys", "number", "rows", "spread", "values")

    def __init__(self, rows: Rows, keys: int, values: NDArray[Any]) -> None:
        self.rows, self.keys, self.values = rows, keys, values
        self.number = next(_numbers)
        self.spread: dict[int, NDArray[Any]] | None = None

    @staticmethod
    def minimum(*values: Any) -> Any:
        """Return the smaller of two values, row by row."""
        first, second = values
        if first.__class__ is not Column:
            first, second = second, first
        return compute(np.minimum, first, second)

    @staticmethod
    def maximum(*values: Any) -> Any:
        """Return the largest value, row by row."""
        return Column.call_cached(_compute_maximum, *values)

    @staticmethod
    def where(condition: Any, then: Any, otherwise: Any) -> Any:
        """Return ``then`` in the rows where the condition is true, else ``otherwise``."""
        return compute_jointly(np.where, condition, then, otherwise)

    @staticmethod
    def map_distinct(function: Callable[..., Any], *numbers: Any) -> Any:
        """Return ``function`` of each distinct row of ``numbers`` (``distinct_rows.py``)."""
        from shardscope.prediction.batch.distinct_rows import map_distinct

        return map_distinct(function, *numbers)

    @staticmethod
    def call_cached(function: Callable[..., Any], *values: Any) -> Any:
        """Return ``function(*values)``, from the cache if it was called with the same columns and numbers."""
        rows, key = cache_key(function, values)
        result = rows.results.get(key)
        if result is None:
            result = rows.results[key] = function(*values)
        return result

    def group_equal(self) -> Column:
        """Return the column re-keyed by its own distinct values.

        A product of two degrees, for example, has fewer distinct values than the degrees have combinations.
        """
        key = Column.group_equal, self.number
        grouped: Column | None = self.rows.results.get(key)
        if grouped is None:
            keys, first = self.rows.regroup(self.keys, encode_values(self.values)[0])
            grouped = self.rows.results[key] = Column(self.rows, keys, self.values[first])
        return grouped

    def max(self) -> Any:
        """Return the largest value."""
        return self.values.max()

    def any(self) -> bool:
        """Return whether the value is true in any row."""
        return bool(self.values.any())

    def all(self) -> bool:
        """Return whether the value is true in all rows."""
        return bool(self.values.all())

    # Python sets __hash__ to None on classes that define __eq__ (set below with the other comparisons).
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TypeError("a column of many plans is neither true nor false: use where() or any_true()")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options:
            return NotImplemented
        return compute_jointly(ufunc, *inputs)

    def __neg__(self) -> Column:
        return _compute_unary(np.negative, self)

    def __invert__(self) -> Column:
        return _compute_unary(np.invert, self)

    def __add__(self, other: Any) -> Any:
        if other.__class__ in _INTEGERS and not other:
            return self
        return compute(np.add, self, other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        if other.__class__ in _INTEGERS and not other:
            return 0
        return compute(np.multiply, self, other)

    __rmul__ = __mul__


_INTEGERS = (int, bool)
"""Types whose 0 is neutral in a sum. The float 0.0 is not: adding it turns integers into floats."""


def compute_jointly(ufunc: Callable[..., NDArray[Any]], *values: Any) -> Any:
    """Return ``ufunc`` (or ``numpy.where``) of the values, over the distinct rows of all columns in them."""
    rows, key = cache_key(ufunc, values)
    result = rows.results.get(key)
    if result is None:
        keys = joint_keys(values)
        result = ufunc(*(expand(rows, keys, value) for value in values))
        result = rows.results[key] = Column(rows, keys, result)
    return result


def cache_key(operation: Any, values: Sequence[Any]) -> tuple[Rows, tuple[Any, ...]]:
    """Return the table of the columns among ``values``, and the cache key of ``operation`` on ``values``."""
    rows: Any = None
    key = [operation]
    for value in values:
        if value.__class__ is Column:
            rows = value.rows
            key.append(value.number)
        else:
            # The class is part of the key: 1, 1.0 and True compare equal but give different dtypes.
            key.append((value.__class__, value))
    return rows, tuple(key)


def joint_keys(values: Sequence[Any]) -> int:
    """Return the bit mask of the keys that ``values`` depend on together."""
    keys = 0
    for value in values:
        if type(value) is Column:
            keys = value.rows.join(keys, value.keys)[0] if keys else value.keys
    return keys


def expand(rows: Rows, keys: int, value: Any) -> Any:
    """Return ``value`` at the distinct rows of ``keys``: an array for a column, else the number itself."""
    if type(value) is not Column or value.keys == keys:
        return value.values if type(value) is Column else value
    indices = rows.join(keys, value.keys)[2]
    return value.values if indices is None else _take(value, keys, indices)


def compute(ufunc: Any, left: Column, right: Any) -> Any:
    """Return ``ufunc`` of a column and a column or number, from the cache if it was computed before."""
    rows = left.rows
    if right.__class__ is not Column:
        key = ufunc, left.number, right.__class__, right
        result = rows.results.get(key)
        if result is None:
            result = rows.results[key] = Column(rows, left.keys, ufunc(left.values, right))
        return result
    pair = ufunc, left.number, right.number
    result = rows.results.get(pair)
    if result is None:
        result = rows.results[pair] = _compute_binary(ufunc, left, right)
    return result


def _compute_binary(ufunc: Any, left: Column, right: Column) -> Column:
    if left.keys == right.keys:
        return Column(left.rows, left.keys, ufunc(left.values, right.values))
    keys, left_indices, right_indices = left.rows.join(left.keys, right.keys)
    first = left.values if left_indices is None else _take(left, keys, left_indices)
    second = right.values if right_indices is None else _take(right, keys, right_indices)
    return Column(left.rows, keys, ufunc(first, second))


def _take(column: Column, keys: int, indices: NDArray[np.int64]) -> NDArray[Any]:
    """Return the column's values at the distinct rows of ``keys``; ``indices`` are those of its own rows.

    The result is cached, since half of the calls repeat: a layer's seconds enter several sums.
    """
    spread = column.spread
    if spread is None:  # created on demand: most columns need none, and each dict costs garbage collection
        spread = column.spread = {}
    result = spread.get(keys)
    if result is None:
        # The indices are always in range; mode="clip" only skips numpy's bounds check.
        result = spread[keys] = column.values.take(indices, mode="clip")
    return result


def _compute_unary(ufunc: Any, column: Column) -> Column:
    key = ufunc, column.number
    result: Column | None = column.rows.results.get(key)
    if result is None:
        result = column.rows.results[key] = Column(column.rows, column.keys, ufunc(column.values))
    return result


def sum_columns(values: Sequence[Any]) -> Any:
    """Return the sum. Columns with equal keys are added first, because they have the fewest rows."""
    by_keys: dict[int, Any] = {}
    numbers: Any = 0
    for value in values:
        if type(value) is not Column:
            numbers = numbers + value
        else:
            partial_sum = by_keys.get(value.keys)
            by_keys[value.keys] = value if partial_sum is None else partial_sum + value
    return sum(sorted(by_keys.values(), key=lambda value: len(value.values)), numbers)


def _compute_maximum(*values: Any) -> Any:
    """Return the maximum. Columns with equal keys are compared first, because they have the fewest rows."""
    by_keys: dict[int, Any] = {}
    numbers: list[Any] = []
    for value in values:
        if value.__class__ is not Column:
            numbers.append(value)
        else:
            largest = by_keys.get(value.keys)
            by_keys[value.keys] = value if largest is None else compute(np.maximum, largest, value)
    largest, *others = sorted(by_keys.values(), key=lambda value: len(value.values))
    for other in (*others, *numbers):
        largest = compute(np.maximum, largest, other)
    return largest


def _define_operator(ufunc: Any, name: str) -> None:
    def compute_operator(self: Column, other: Any) -> Any:
        return compute(ufunc, self, other)

    def compute_reflected(self: Column, other: Any) -> Any:
        if name == "floordiv" and other.__class__ in _INTEGERS and not other:
            return 0
        return compute_jointly(ufunc, other, self)

    setattr(Column, f"__{name}__", compute_operator)
    setattr(Column, f"__r{name}__", compute_reflected)


_ARITHMETIC: dict[str, Any] = {
    "sub": np.subtract,
    "floordiv": np.floor_divide,
    "truediv": np.true_divide,
    "mod": np.remainder,
    "pow": np.power,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
_COMPARISONS: dict[str, Any] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
for _name, _ufunc in _ARITHMETIC.items():
    _define_operator(_ufunc, _name)
for _name, _ufunc in _COMPARISONS.items():
    setattr(Column, f"__{_name}__", lambda self, other, ufunc=_ufunc: compute(ufunc, self, other))
