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

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, TypeVarTuple, cast

import numpy as np

from shardscope.core.ops import Array, Operand
from shardscope.frameworks.distinct_values import encode_values

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.ops import Scalar
    from shardscope.prediction.batch.rows import Rows

Values: TypeAlias = "NDArray[Scalar]"
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CacheKey: TypeAlias = tuple[object, ...]
"""An operation and its operands: ids of columns, and types and values of numbers."""

_numbers = count()


class Column(Array):
    """One number for each distinct row of some keys, usable like a number in formulas that broadcast.

    ``keys`` is a bit mask of the keys of ``rows`` that the values depend on. ``number`` is a unique id.
    """

    # Searches create some 100,000 columns: slots save a dict for each, and with it garbage collection.
    __slots__ = ("expanded", "keys", "number", "rows", "values")

    def __init__(self, rows: Rows, keys: int, values: Values) -> None:
        self.rows, self.keys, self.values = rows, keys, values
        self.number = next(_numbers)
        self.expanded: dict[int, Values] | None = None
        """Values at the distinct rows of larger key sets, by key set (:func:`_expand_values`)."""

    @staticmethod
    def minimum(first: Operand, second: Operand) -> Column:
        """Return the smaller of two values, row by row."""
        if not isinstance(first, Column):
            first, second = second, first
        assert isinstance(first, Column)
        return compute(np.minimum, first, second)

    @staticmethod
    def maximum(*values: Operand) -> Column:
        """Return the largest value, row by row."""
        return Column.call_cached(_compute_maximum, *values)

    @staticmethod
    def largest_sum(*sums: tuple[Operand, ...]) -> Column:
        """Return the largest of the sums of equally many values, row by row."""
        return Column.call_cached(_compute_largest_sum, len(sums[0]), *chain.from_iterable(sums))

    @staticmethod
    def compute_at_once(function: Callable[[*Ts], T], *values: *Ts) -> T:
        """Return ``function(*values)``, row by row, without keeping intermediate results."""
        return cast("T", compute_jointly(cast("ArrayFunction", function), *values))

    @staticmethod
    def where(condition: object, then: object, otherwise: object) -> Column:
        """Return ``then`` in the rows where the condition is true, else ``otherwise``."""
        return Column.call_cached(_select, condition, then, otherwise)

    @staticmethod
    def map_distinct(function: Callable[[*Ts], T], *numbers: *Ts) -> T:
        """Return ``function`` of each distinct row of ``numbers`` (``distinct_rows.py``)."""
        # Imported late: ``distinct_rows`` imports this module.
        from shardscope.prediction.batch.distinct_rows import map_distinct

        return map_distinct(function, *numbers)

    @staticmethod
    def call_cached(function: Callable[[*Ts], T], *values: *Ts) -> T:
        """Return ``function(*values)``, from the cache if it was called with the same columns and numbers."""
        rows, key = build_cache_key(function, values)
        result = rows.results.find(key)
        if result is None:
            result = rows.results[key] = function(*values)
        return cast("T", result)

    def group_equal(self) -> Column:
        """Return the column re-keyed by its own distinct values.

        A product of two degrees, for example, has fewer distinct values than the degrees have combinations.
        """
        key = Column.group_equal, self.number
        grouped = self.rows.columns.find(key)
        if grouped is None:
            keys, first = self.rows.regroup(self.keys, encode_values(self.values)[0])
            grouped = self.rows.columns[key] = Column(self.rows, keys, self.values[first])
        return grouped

    def max(self) -> Scalar:
        """Return the largest value."""
        largest: Scalar = self.values.max()
        return largest

    def any(self) -> bool:
        """Return whether the value is true in any row."""
        return bool(self.values.any())

    def all(self) -> bool:
        """Return whether the value is true in all rows."""
        return bool(self.values.all())

    # Python sets __hash__ to None on classes that define __eq__. Columns are hashed by identity.
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TypeError("a column of many plans is neither true nor false: use where() or any_true()")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **options: object) -> object:
        # numpy calls this if the left operand is a numpy scalar, or if a formula calls a ufunc (np.ceil).
        if method != "__call__" or options:
            return NotImplemented
        return compute_jointly(ufunc, *inputs)

    def __neg__(self) -> Column:
        return _compute_unary(np.negative, self)

    def __invert__(self) -> Column:
        return _compute_unary(np.invert, self)

    def __add__(self, other: Operand) -> Column:
        if _is_zero(other) and (other.__class__ is not float or self.values.dtype == np.float64):
            return self
        return compute(np.add, self, other)

    __radd__ = __add__

    def __sub__(self, other: Operand) -> Column:
        return compute(np.subtract, self, other)

    def __rsub__(self, other: Operand) -> Column:
        return compute_jointly(np.subtract, other, self)

    def __mul__(self, other: Operand) -> Column | Literal[0]:
        if other.__class__ in _INTEGERS and not other:
            return 0
        return compute(np.multiply, self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Operand) -> Column:
        return compute(np.true_divide, self, other)

    def __rtruediv__(self, other: Operand) -> Column:
        return compute_jointly(np.true_divide, other, self)

    def __floordiv__(self, other: Operand) -> Column:
        return compute(np.floor_divide, self, other)

    def __rfloordiv__(self, other: Operand) -> Column | Literal[0]:
        if other.__class__ in _INTEGERS and not other:
            return 0
        return compute_jointly(np.floor_divide, other, self)

    def __mod__(self, other: Operand) -> Column:
        return compute(np.remainder, self, other)

    def __rmod__(self, other: Operand) -> Column:
        return compute_jointly(np.remainder, other, self)

    def __pow__(self, other: Operand) -> Column:
        return compute(np.power, self, other)

    def __rpow__(self, other: Operand) -> Column:
        return compute_jointly(np.power, other, self)

    def __and__(self, other: Operand) -> Column:
        return compute(np.bitwise_and, self, other)

    def __rand__(self, other: Operand) -> Column:
        return compute_jointly(np.bitwise_and, other, self)

    def __or__(self, other: Operand) -> Column:
        return compute(np.bitwise_or, self, other)

    def __ror__(self, other: Operand) -> Column:
        return compute_jointly(np.bitwise_or, other, self)

    def __lt__(self, other: Operand) -> Column:
        return compute(np.less, self, other)

    def __le__(self, other: Operand) -> Column:
        return compute(np.less_equal, self, other)

    def __gt__(self, other: Operand) -> Column:
        return compute(np.greater, self, other)

    def __ge__(self, other: Operand) -> Column:
        return compute(np.greater_equal, self, other)

    # Element by element, as numpy's own arrays compare; ``object`` promises one bool.
    def __eq__(self, other: Operand) -> Column:  # type: ignore[override]
        return compute(np.equal, self, other)

    def __ne__(self, other: Operand) -> Column:  # type: ignore[override]
        return compute(np.not_equal, self, other)


_INTEGERS = (int, bool)
"""Types whose 0 is neutral in a sum. The float 0.0 is neutral for floats; it turns integers into floats."""


def _is_zero(value: object) -> bool:
    return (value.__class__ in _INTEGERS or value.__class__ is float) and not value


class ArrayFunction(Protocol):
    """A numpy function of arrays and numbers that broadcasts, such as ``numpy.where``."""

    def __call__(self, *values: object) -> Values: ...


def compute_jointly(function: np.ufunc | ArrayFunction, *values: object) -> Column:
    """Return ``function`` of the values, computed over the distinct rows of all columns among them."""
    rows, key = build_cache_key(function, values)
    result = rows.columns.find(key)
    if result is None:
        result = rows.columns[key] = _compute_jointly(rows, function, values)
    return result


def _compute_jointly(rows: Rows, function: np.ufunc | ArrayFunction, values: Sequence[object]) -> Column:
    keys = join_keys(values)
    return Column(rows, keys, function(*(expand_operand(rows, keys, value) for value in values)))


def _select(condition: object, then: object, otherwise: object) -> Column:
    """Return ``then`` in the rows where the condition is true, else ``otherwise``."""
    if isinstance(condition, Column) and isinstance(then, Column) and condition.values.all():
        return then
    values = condition, then, otherwise
    rows = next(value for value in values if isinstance(value, Column)).rows
    # numpy's stubs take arrays only, where operands are ``object``.
    return _compute_jointly(rows, cast("ArrayFunction", np.where), values)


def build_cache_key(operation: object, values: Sequence[object]) -> tuple[Rows, CacheKey]:
    """Return the table of the columns among ``values``, and the cache key of ``operation`` on ``values``."""
    rows: Rows | None = None
    key = [operation]
    for value in values:
        if isinstance(value, Column):
            rows = value.rows
            key.append(value.number)
        else:
            # The class is part of the key: 1, 1.0 and True compare equal but give different dtypes.
            key.append((value.__class__, value))
    assert rows is not None, "an operation on columns needs a column"
    return rows, tuple(key)


def join_keys(values: Sequence[object]) -> int:
    """Return the bit mask of the keys that ``values`` depend on together."""
    keys = 0
    for value in values:
        if isinstance(value, Column):
            keys = value.rows.join(keys, value.keys)[0] if keys else value.keys
    return keys


def expand_operand(rows: Rows, keys: int, value: object) -> object:
    """Return ``value`` at the distinct rows of ``keys``: an array for a column, else the number itself."""
    if not isinstance(value, Column):
        return value
    if value.keys == keys:
        return value.values
    return _expand_values(value, keys, rows.join(keys, value.keys)[2])


def compute(ufunc: np.ufunc, left: Column, right: Operand) -> Column:
    """Return ``ufunc`` of a column and a column or number, from the cache if it was computed before."""
    rows = left.rows
    if not isinstance(right, Column):
        # The class is part of the key, as in :func:`build_cache_key`.
        key = ufunc, left.number, right.__class__, right
        result = rows.columns.find(key)
        if result is None:
            result = rows.columns[key] = Column(rows, left.keys, ufunc(left.values, right))
        return result
    pair = ufunc, left.number, right.number
    result = rows.columns.find(pair)
    if result is None:
        result = rows.columns[pair] = _compute_binary(ufunc, left, right)
    return result


def _compute_binary(ufunc: np.ufunc, left: Column, right: Column) -> Column:
    if left.keys == right.keys:
        return Column(left.rows, left.keys, ufunc(left.values, right.values))
    keys, left_indices, right_indices = left.rows.join(left.keys, right.keys)
    first = _expand_values(left, keys, left_indices)
    second = _expand_values(right, keys, right_indices)
    return Column(left.rows, keys, ufunc(first, second))


def _expand_values(column: Column, keys: int, indices: NDArray[np.int64] | None) -> Values:
    """Return the column's values at the distinct rows of ``keys``; ``indices`` are those of its own rows.

    None for the identity. The result is cached, since half of the calls repeat: a layer's seconds enter
    several sums.
    """
    if indices is None:
        return column.values
    expanded = column.expanded
    if expanded is None:  # created on demand: most columns need none, and each dict costs garbage collection
        expanded = column.expanded = {}
    result = expanded.get(keys)
    if result is None:
        # The indices are always in range; mode="clip" only skips numpy's bounds check.
        result = expanded[keys] = column.values.take(indices, mode="clip")
    return result


def _compute_unary(ufunc: np.ufunc, column: Column) -> Column:
    key = ufunc, column.number
    result = column.rows.columns.find(key)
    if result is None:
        result = column.rows.columns[key] = Column(column.rows, column.keys, ufunc(column.values))
    return result


def sum_columns(values: Sequence[Column | float]) -> Column | float:
    """Return the sum of columns and numbers."""
    columns = [value for value in values if isinstance(value, Column)]
    numbers = sum([value for value in values if not isinstance(value, Column)])
    if not columns:
        return numbers
    return _fold(np.add, columns[0].rows, map(_Partial.from_column, columns)) + numbers


def _compute_maximum(*values: Operand) -> Column:
    """Return the maximum of columns and numbers, at least one of them a column."""
    columns = [value for value in values if isinstance(value, Column)]
    largest = _fold(np.maximum, columns[0].rows, map(_Partial.from_column, columns))
    for value in values:
        if not isinstance(value, Column):
            largest = compute(np.maximum, largest, value)
    return largest


def _compute_largest_sum(num_terms: int, *values: Operand) -> Column:
    """Return the largest sum of ``num_terms`` consecutive values, at least one of all values a column."""
    rows = next(value for value in values if isinstance(value, Column)).rows
    numbers: list[float] = []

    # A generator: each sum is combined with the maximum before the next one is computed.
    def compute_sums() -> Iterator[_Partial]:
        for first in range(0, len(values), num_terms):
            terms = values[first : first + num_terms]
            columns = [value for value in terms if isinstance(value, Column)]
            number = sum([cast("float", value) for value in terms if not isinstance(value, Column)])
            if not columns:
                numbers.append(number)
                continue
            total = _fold_partials(np.add, rows, map(_Partial.from_column, columns))
            yield _Partial(total.keys, cast("Values", total.values + number)) if number else total

    largest = _fold(np.maximum, rows, compute_sums())
    return _compute_maximum(largest, *numbers)


class _Partial(NamedTuple):
    """A partial result of :func:`_fold`: values at the distinct rows of ``keys``."""

    keys: int
    values: Values
    column: Column | None = None
    """The column that has the values, which must not change; None: they may be overwritten."""

    @classmethod
    def from_column(cls, column: Column) -> _Partial:
        return cls(column.keys, column.values, column)

    def expand(self, keys: int, indices: NDArray[np.int64] | None) -> _Partial:
        """Return the values at the distinct rows of ``keys``; ``indices`` are those of its own rows."""
        return self if indices is None else _Partial(keys, self.values.take(indices, mode="clip"))


def _fold(ufunc: np.ufunc, rows: Rows, partials: Iterable[_Partial]) -> Column:
    """Return ``ufunc``, an associative one, of all partial results, as a column."""
    result = _fold_partials(ufunc, rows, partials)
    return Column(rows, result.keys, result.values) if result.column is None else result.column


def _fold_partials(ufunc: np.ufunc, rows: Rows, partials: Iterable[_Partial]) -> _Partial:
    """Return ``ufunc``, an associative one, of all partial results.

    Those with equal keys are combined first, then those with the fewest rows, because a result has as many
    rows as the joint keys of its operands. Results in between are not cached, but overwritten: most are used
    once, and new memory costs more than the arithmetic.
    """
    by_keys: dict[int, _Partial] = {}
    for partial in partials:
        known = by_keys.get(partial.keys)
        by_keys[partial.keys] = partial if known is None else _combine(ufunc, rows, known, partial)
    result, *others = sorted(by_keys.values(), key=lambda partial: len(partial.values))
    for other in others:
        result = _combine(ufunc, rows, result, other)
    return result


def _combine(ufunc: np.ufunc, rows: Rows, first: _Partial, second: _Partial) -> _Partial:
    keys, indices, other_indices = rows.join(first.keys, second.keys)
    left, right = first.expand(keys, indices), second.expand(keys, other_indices)
    # Of two dtypes the result's may be another one.
    spare = right if left.column is not None else left
    reused = spare.values if spare.column is None and left.values.dtype == right.values.dtype else None
    values: Values = ufunc(left.values, right.values, out=reused)
    return _Partial(keys, values)
