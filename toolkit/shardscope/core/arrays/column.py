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
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.core.arrays.deduplicate import value_codes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.arrays.rows import Rows


_numbers = count()


class Column:
    """One number for each distinct row of some keys, usable like a number in formulas that broadcast.

    ``keys`` is a bit mask of the keys of ``rows`` that the values depend on. ``number`` is a unique id.
    """

    __slots__ = ("keys", "number", "rows", "spread", "values")

    def __init__(self, rows: Rows, keys: int, values: NDArray[Any]) -> None:
        self.rows, self.keys, self.values = rows, keys, values
        self.number = next(_numbers)
        self.spread: dict[int, NDArray[Any]] | None = None

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
        raise TypeError("a column of many plans is neither true nor false: use where() or holds()")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options:
            return NotImplemented
        return together(ufunc, *inputs)

    def __neg__(self) -> Column:
        return _alone(np.negative, self)

    def __invert__(self) -> Column:
        return _alone(np.invert, self)

    def __add__(self, other: Any) -> Any:
        if other.__class__ in _WHOLE and not other:
            return self
        return applied(np.add, self, other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        if other.__class__ in _WHOLE and not other:
            return 0
        return applied(np.multiply, self, other)

    __rmul__ = __mul__


_WHOLE = (int, bool)
"""Types whose 0 is neutral in a sum. The float 0.0 is not: adding it turns integers into floats."""


def together(ufunc: Callable[..., NDArray[Any]], *values: Any) -> Any:
    """Return ``ufunc`` (or ``numpy.where``) of the values, over the distinct rows of all columns in them."""
    rows, key = question(ufunc, values)
    found = rows.known.get(key)
    if found is None:
        keys = keys_of(values)
        found = ufunc(*(at_rows(rows, keys, value) for value in values))
        found = rows.known[key] = Column(rows, keys, found)
    return found


ARRAYS = frozenset({Column, np.ndarray})
"""Types that hold the numbers of many plans."""


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``function`` to cache its results by its arguments: columns by identity, numbers by value.

    Other arguments must be hashable. Calls with numpy arrays are not cached.
    """
    of_numbers = lru_cache(maxsize=2**14)(function)

    def answer(*values: Any) -> Any:
        if ARRAYS.isdisjoint(map(type, values)):
            return of_numbers(*values)
        if Column not in map(type, values):
            return function(*values)
        rows, key = question(function, values)
        found = rows.known.get(key)
        if found is None:
            found = rows.known[key] = function(*values)
        return found

    return answer


def question(operation: Any, values: Sequence[Any]) -> tuple[Rows, tuple[Any, ...]]:
    """Return the table of the columns among ``values``, and the cache key of ``operation`` on ``values``."""
    rows: Any = None
    told = [operation]
    for value in values:
        if value.__class__ is Column:
            rows = value.rows
            told.append(value.number)
        else:
            # The class is part of the key: 1, 1.0 and True compare equal but give different dtypes.
            told.append((value.__class__, value))
    return rows, tuple(told)


def keys_of(values: Sequence[Any]) -> int:
    """Return the bit mask of keys that all of ``values`` together depend on."""
    keys = 0
    for value in values:
        if type(value) is Column:
            keys = value.rows.joined(keys, value.keys)[0] if keys else value.keys
    return keys


def at_rows(rows: Rows, keys: int, value: Any) -> Any:
    """Return ``value`` at the distinct rows of ``keys``: an array for a column, else the number itself."""
    if type(value) is not Column or value.keys == keys:
        return value.values if type(value) is Column else value
    places = rows.joined(keys, value.keys)[2]
    return value.values if places is None else _spread(value, keys, places)


def applied(ufunc: Any, left: Column, right: Any) -> Any:
    """Return ``ufunc`` of a column and a column or number, from the cache if it was computed before."""
    rows = left.rows
    if right.__class__ is not Column:
        key = ufunc, left.number, right.__class__, right
        found = rows.known.get(key)
        if found is None:
            found = rows.known[key] = Column(rows, left.keys, ufunc(left.values, right))
        return found
    pair = ufunc, left.number, right.number
    found = rows.known.get(pair)
    if found is None:
        found = rows.known[pair] = _of_two(ufunc, left, right)
    return found


def _of_two(ufunc: Any, left: Column, right: Column) -> Column:
    if left.keys == right.keys:
        return Column(left.rows, left.keys, ufunc(left.values, right.values))
    keys, one, other = left.rows.joined(left.keys, right.keys)
    first = left.values if one is None else _spread(left, keys, one)
    second = right.values if other is None else _spread(right, keys, other)
    return Column(left.rows, keys, ufunc(first, second))


def _spread(column: Column, keys: int, places: NDArray[np.int64]) -> NDArray[Any]:
    """Return the column's values at the distinct rows of ``keys``; ``places`` indexes the column's own.

    The result is cached, since half of the calls repeat: a layer's seconds enter several sums.
    """
    spread = column.spread
    if spread is None:  # created on demand: most columns need none, and each dict costs garbage collection
        spread = column.spread = {}
    found = spread.get(keys)
    if found is None:
        # The indices are always in range; mode="clip" only skips numpy's bounds check.
        found = spread[keys] = column.values.take(places, mode="clip")
    return found


def _alone(ufunc: Any, column: Column) -> Column:
    key = ufunc, column.number
    found: Column | None = column.rows.known.get(key)
    if found is None:
        found = column.rows.known[key] = Column(column.rows, column.keys, ufunc(column.values))
    return found


def total(values: Sequence[Any]) -> Any:
    """Return the sum. Columns with equal keys are added first, because they have the fewest rows."""
    alike: dict[int, Any] = {}
    plain: Any = 0
    for value in values:
        if type(value) is not Column:
            plain = plain + value
        else:
            before = alike.get(value.keys)
            alike[value.keys] = value if before is None else before + value
    return sum(sorted(alike.values(), key=lambda value: len(value.values)), plain)


def by_value(column: Any) -> Any:
    """Return the column re-keyed by its own distinct values; return anything else unchanged.

    A product of two degrees, for example, has fewer distinct values than the degrees have combinations.
    """
    if type(column) is not Column:
        return column
    key = by_value, column.number
    found = column.rows.known.get(key)
    if found is None:
        keys, first = column.rows.regrouped(column.keys, value_codes(column.values)[0])
        found = column.rows.known[key] = Column(column.rows, keys, column.values[first])
    return found


def _operator(ufunc: Any, name: str) -> None:
    def straight(self: Column, other: Any) -> Any:
        return applied(ufunc, self, other)

    def reflected(self: Column, other: Any) -> Any:
        if name == "floordiv" and other.__class__ in _WHOLE and not other:
            return 0
        return together(ufunc, other, self)

    setattr(Column, f"__{name}__", straight)
    setattr(Column, f"__r{name}__", reflected)


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
    _operator(_ufunc, _name)
for _name, _ufunc in _COMPARISONS.items():
    setattr(Column, f"__{_name}__", lambda self, other, ufunc=_ufunc: applied(ufunc, self, other))
