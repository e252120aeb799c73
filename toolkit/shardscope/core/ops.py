"""The few operations that formulas need besides Python's own arithmetic.

A formula is written, and typed, for the numbers of one plan. The search evaluates the same formula for many
plans at once: in place of numbers it passes numpy arrays, or objects of a subclass of :class:`Array`
(``prediction/batch``), which support the operators and bring their own operations. So a formula uses ``if``
only for conditions that all plans of one search share, and :func:`where` for those that may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Self, TypeAlias, TypeVar, TypeVarTuple, cast

import numpy as np

N = TypeVar("N", bound=float)
"""A number: ``int`` for bytes and counts, ``float`` for seconds and FLOPs."""
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Row = TypeVar("Row", bound="tuple[object, ...]")


_ARRAY_TYPES: set[type] = {np.ndarray}
"""Types of arrays: numpy's, and the subclasses of :class:`Array`."""


class Array:
    """Base class of arrays that formulas take in place of numbers.

    A subclass implements the operations of this module under the same names. Their arguments are arrays and
    numbers, at least one of them an array of the subclass.
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        _ARRAY_TYPES.add(cls)

    @staticmethod
    def minimum(first: Operand, second: Operand) -> Operand:
        """Return the smaller value, element by element."""
        raise NotImplementedError

    @staticmethod
    def maximum(*values: Operand) -> Operand:
        """Return the largest value, element by element."""
        raise NotImplementedError

    @staticmethod
    def largest_sum(*sums: tuple[Operand, ...]) -> Operand:
        """Return the largest of the sums of equally many values, element by element."""
        raise NotImplementedError

    @staticmethod
    def compute_at_once(function: Callable[[*Ts], T], *values: *Ts) -> T:
        """Return ``function(*values)``, element by element, without keeping intermediate results."""
        raise NotImplementedError

    @staticmethod
    def where(condition: object, then: object, otherwise: object) -> object:
        """Return ``then`` where the condition is true, else ``otherwise``."""
        raise NotImplementedError

    @staticmethod
    def map_distinct(function: Callable[[*Ts], T], *numbers: *Ts) -> T:
        """Return ``function`` of each distinct row of ``numbers``."""
        raise NotImplementedError

    @staticmethod
    def call_cached(function: Callable[[*Ts], T], *values: *Ts) -> T:
        """Return ``function(*values)``, computed once for the same arrays."""
        raise NotImplementedError

    def group_equal(self) -> Self:
        """Return this array, known to depend on nothing but its own values."""
        raise NotImplementedError

    def max(self) -> Scalar:
        """Return the largest element."""
        raise NotImplementedError

    def any(self) -> bool:
        """Return whether an element is true."""
        raise NotImplementedError

    def all(self) -> bool:
        """Return whether all elements are true."""
        raise NotImplementedError


Scalar: TypeAlias = np.int64 | np.float64 | np.bool_
"""An element of an array: bytes and counts, seconds and FLOPs, conditions."""
Operand: TypeAlias = Array | float
"""An operand of the operations: an array, or a number that all plans share."""

_ARRAYS = (Array, np.ndarray)


def is_array(value: object) -> bool:
    """Return whether ``value`` holds the numbers of many plans."""
    return isinstance(value, _ARRAYS)


def minimum(first: N, second: N) -> N:
    """Return the smaller of two, element by element if either is an array."""
    if not (isinstance(first, _ARRAYS) or isinstance(second, _ARRAYS)):
        return first if first <= second else second
    if array := _array_type(first, second):
        return cast("N", array.minimum(first, second))
    return cast("N", np.minimum(first, second))


def maximum(first: N, *others: N) -> N:
    """Return the largest value, element by element if any is an array."""
    # Plain numbers first: a plan's memory takes the maximum of some 100 pairs of them.
    if first.__class__ is int or first.__class__ is float:
        largest = first
        for other in others:
            if other.__class__ is not int and other.__class__ is not float:
                break
            if other > largest:
                largest = other
        else:
            return largest
    if array := _array_type(first, *others):
        return cast("N", array.maximum(first, *others))
    for other in others:
        if isinstance(first, np.ndarray) or isinstance(other, np.ndarray):
            first = cast("N", np.maximum(first, other))
        elif other > first:
            first = other
    return first


def largest_sum(sums: Sequence[tuple[N, ...]]) -> N:
    """Return the largest of the sums of equally many numbers, element by element if any is an array."""
    if array := _array_type(*chain.from_iterable(sums)):
        return cast("N", array.largest_sum(*sums))
    return maximum(*(cast("N", sum(terms)) for terms in sums))


def compute_at_once(function: Callable[[*Ts], T], *values: *Ts) -> T:
    """Return ``function(*values)``, arithmetic whose intermediate results are used nowhere else.

    The search caches the result of every operator, but of this function only its own result: memory that
    is not kept is used again, and faster than new one. ``function`` is a function of a module.
    """
    if array := _array_type(*values):
        return array.compute_at_once(function, *values)
    return function(*values)


def where(condition: bool, then: T, otherwise: T) -> T:
    """Return ``then`` where the condition is true, else ``otherwise``; element by element for an array.

    Two named tuples of one type give a named tuple of that type, field by field.
    """
    if condition is True:
        return then
    if condition is False:
        return otherwise
    if not is_array(condition):
        return then if condition else otherwise
    if isinstance(then, tuple) and isinstance(otherwise, tuple):
        return _build_tuple(then, (where(condition, *pair) for pair in zip(then, otherwise, strict=True)))
    if then is otherwise:
        return then
    if array := _array_type(condition, then, otherwise):
        return cast("T", array.where(condition, then, otherwise))
    return cast("T", np.where(condition, then, otherwise))


def ceil_div(amount: int, parts: int) -> int:
    """Return ``amount / parts`` rounded up, the share of the fullest of ``parts`` ranks."""
    return -(-amount // parts)


def all_true(condition: int) -> bool:
    """Return whether a condition is true, for all plans if it is an array."""
    return bool(condition.all()) if isinstance(condition, _ARRAYS) else bool(condition)


def any_true(condition: int) -> bool:
    """Return whether a condition is true, for any plan if it is an array."""
    return bool(condition.any()) if isinstance(condition, _ARRAYS) else bool(condition)


def largest_element(number: N) -> N:
    """Return the number; of an array, its largest element as a plain number."""
    return cast("N", number.max().item()) if isinstance(number, _ARRAYS) else number


def pick_largest_row(rows: Sequence[Row]) -> Row:
    """Return the row with the largest first number (the earliest on ties), element by element for arrays."""
    if not _has_arrays(*[row[0] for row in rows]):
        return max(rows, key=itemgetter(0))
    largest = rows[0]
    for row in rows[1:]:
        is_larger = row[0] > largest[0]  # type: ignore[operator]  # the first field of a row is a number
        # By identity: for arrays the comparison gives an array, which has no single truth value.
        if is_larger is True:
            largest = row
        elif is_larger is not False:
            largest = where(is_larger, row, largest)
    return largest


def group_equal(number: N) -> N:
    """Return the number; of an array, one in which plans with equal values share one element.

    Use it where only the value matters from here on. Tokens per rank, for example, are the product of the
    micro-batch size and the sequence length per rank: what depends on tokens is then computed once for all
    plans with equal tokens.
    """
    return cast("N", number.group_equal()) if isinstance(number, Array) else number


def map_distinct(function: Callable[[*Ts], T], *numbers: *Ts) -> T:
    """Return ``function(*numbers)``, calling the scalar function once for each distinct row of arrays.

    Use it for quantities that are counted tensor by tensor: thousands of plans have few distinct degrees.
    ``function`` returns a number, or a named tuple of numbers whose fields become arrays. Pass a ``partial``
    with hashable arguments to have the results cached.
    """
    if not _has_arrays(*numbers):
        return function(*numbers)
    if array := _array_type(*numbers):
        return array.map_distinct(function, *numbers)
    # Thousands of plans have few distinct rows; the scalar function runs once for each of them.
    columns = np.stack(np.broadcast_arrays(*cast("tuple[float, ...]", numbers)))
    distinct, indices = np.unique(columns, axis=1, return_inverse=True)
    # numpy 2.0.0 returns ``return_inverse`` with the dimensions of the input.
    indices = indices.reshape(-1)
    # numpy's integers wrap around; Python's do not.
    rows = (tuple(int(number) for number in row) for row in distinct.T)
    results = [function(*cast("tuple[*Ts]", row)) for row in rows]
    return cast("T", stack_fields(results, lambda field: np.array(field)[indices]))


def stack_fields(results: Sequence[object], stack: Callable[[Sequence[object]], object]) -> object:
    """Return ``stack(results)``; for tuples of one type, a tuple of that type with each field stacked."""
    first = results[0]
    if not isinstance(first, tuple):
        return stack(results)
    rows = cast("Sequence[tuple[object, ...]]", results)
    return _build_tuple(first, (stack_fields(field, stack) for field in zip(*rows, strict=True)))


def cache_by_numbers(function: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
    """Decorate ``function`` to cache its results by its arguments: arrays by identity, numbers by value.

    Other arguments must be hashable. Calls with numpy arrays are not cached.
    """
    of_numbers = lru_cache(maxsize=2**14)(function)

    def call(*values: *Ts) -> T:
        if not _has_arrays(*values):
            return of_numbers(*values)
        if array := _array_type(*values):
            return array.call_cached(function, *values)
        return function(*values)

    return call


def _has_arrays(*values: object) -> bool:
    """Return whether any of ``values`` is an array."""
    # Most calls of most formulas end here: a set operation on types is faster than a loop.
    return not _ARRAY_TYPES.isdisjoint(map(type, values))


def _array_type(*values: object) -> type[Array] | None:
    """Return the class that implements the operations for ``values``; None for plain numbers and numpy."""
    for value in values:
        if isinstance(value, Array):
            return type(value)
    return None


def _build_tuple(like: tuple[object, ...], fields: Iterable[object]) -> tuple[object, ...]:
    """Return a tuple of the type of ``like``, named or plain."""
    build = getattr(type(like), "_make", tuple)
    return cast("tuple[object, ...]", build(fields))
