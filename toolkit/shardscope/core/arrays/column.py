"""Numbers of many plans, of which each is computed once for all plans that agree in what decides it.

A search asks of hundreds of thousands of plans what few of their numbers decide: a layer's weights depend on
tp alone, its activations on tp and the micro-batch. A :class:`Column` has one value for each distinct row of
the keys that decide it, and arithmetic between two columns is done for the distinct rows of both: as numpy
broadcasts axes, but over the combinations that there are, not over all that there could be.

What was computed once is not computed again: an operation on the same columns gives the very same column, so
that plans which differ in recomputation only, say, have the seconds of their products in common. That is
value numbering (Cocke 1970): a column is known by the operation and the columns that made it.
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
    """One number for each distinct row of some keys; reads like a number in formulas that broadcast."""

    __slots__ = ("keys", "number", "rows", "spread", "values")

    def __init__(self, rows: Rows, keys: int, values: NDArray[Any]) -> None:
        self.rows, self.keys, self.values = rows, keys, values
        self.number = next(_numbers)
        self.spread: dict[int, NDArray[Any]] | None = None

    def max(self) -> Any:
        """The largest number."""
        return self.values.max()

    def any(self) -> bool:
        """Whether it holds in any row."""
        return bool(self.values.any())

    def all(self) -> bool:
        """Whether it holds in all rows."""
        return bool(self.values.all())

    # Else comparisons, which are set below, would leave it without one.
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
"""Of these 0 adds nothing; 0.0 makes a float of a whole number."""


def together(ufunc: Callable[..., NDArray[Any]], *values: Any) -> Any:
    """``ufunc`` (or ``numpy.where``) of the values, some of them columns, at the distinct rows of all."""
    rows, key = question(ufunc, values)
    found = rows.known.get(key)
    if found is None:
        keys = keys_of(values)
        found = ufunc(*(at_rows(rows, keys, value) for value in values))
        found = rows.known[key] = Column(rows, keys, found)
    return found


ARRAYS = frozenset({Column, np.ndarray})
"""What stands for many numbers."""


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, with what it answered of the very same columns before, or of equal numbers.

    Whatever else it is given has to be hashable, but for numpy's arrays: of these it is asked each time.
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
    """The rows of those values that are columns, and what tells this question from others."""
    rows: Any = None
    told = [operation]
    for value in values:
        if value.__class__ is Column:
            rows = value.rows
            told.append(value.number)
        else:
            # 1, 1.0 and True are equal and not the same.
            told.append((value.__class__, value))
    return rows, tuple(told)


def keys_of(values: Sequence[Any]) -> int:
    """Keys that decide all of them."""
    keys = 0
    for value in values:
        if type(value) is Column:
            keys = value.rows.joined(keys, value.keys)[0] if keys else value.keys
    return keys


def at_rows(rows: Rows, keys: int, value: Any) -> Any:
    """``value`` at the distinct rows of ``keys``."""
    if type(value) is not Column or value.keys == keys:
        return value.values if type(value) is Column else value
    places = rows.joined(keys, value.keys)[2]
    return value.values if places is None else _spread(value, keys, places)


def applied(ufunc: Any, left: Column, right: Any) -> Any:
    """``ufunc`` of a column and a column or a number."""
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
    """Its values at the distinct rows of ``keys``, which lie at ``places`` of its own.

    Half of them are asked for again: a layer's seconds are added to several others.
    """
    spread = column.spread
    if spread is None:  # most are never asked, and every container is one more for the garbage collector
        spread = column.spread = {}
    found = spread.get(keys)
    if found is None:
        # Places are never out of range: "clip" only leaves the check out.
        found = spread[keys] = column.values.take(places, mode="clip")
    return found


def _alone(ufunc: Any, column: Column) -> Column:
    key = ufunc, column.number
    found: Column | None = column.rows.known.get(key)
    if found is None:
        found = column.rows.known[key] = Column(column.rows, column.keys, ufunc(column.values))
    return found


def total(values: Sequence[Any]) -> Any:
    """The sum, of columns that the same keys decide first: these have the fewest rows."""
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
    """The same numbers, told apart by themselves: a product of two degrees may decide what both do.

    What is no column stays as it is.
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
