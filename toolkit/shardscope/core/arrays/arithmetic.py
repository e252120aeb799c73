"""The few operations that must mean the same for a number and for an array of plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from shardscope.core.arrays import column, distinct_rows
from shardscope.core.arrays.column import ARRAYS, Column, applied, remembering, together

_ARRAY: Any = (np.ndarray, Column)


def is_array(value: Any) -> bool:
    """Whether it stands for many plans."""
    return isinstance(value, _ARRAY)


def by_value(number: Any) -> Any:
    """The same number; of many plans told apart by itself, where not all that made it matters any more.

    Tokens are a product of the micro-batch and the parts of a sequence: what they decide is then computed
    once for all plans that have as many.
    """
    return column.by_value(number) if number.__class__ is Column else number


def smallest(first: Any, second: Any) -> Any:
    """The smaller of two, element by element if either is an array."""
    if first.__class__ is Column:
        return applied(np.minimum, first, second)
    if second.__class__ is Column:
        return applied(np.minimum, second, first)
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return np.minimum(first, second)
    return first if first <= second else second


def largest(first: Any, *others: Any) -> Any:
    """The largest of all, element by element if any is an array."""
    for other in others:
        if first.__class__ is Column or other.__class__ is Column:
            return _largest_column(first, *others)
        if isinstance(first, np.ndarray) or isinstance(other, np.ndarray):
            first = np.maximum(first, other)
        elif other > first:
            first = other
    return first


@remembering
def _largest_column(*values: Any) -> Any:
    """Those that the same keys decide are compared first: these have the fewest rows."""
    alike: dict[int, Any] = {}
    plain: list[Any] = []
    for value in values:
        if value.__class__ is not Column:
            plain.append(value)
        else:
            before: Any = alike.get(value.keys)
            alike[value.keys] = value if before is None else applied(np.maximum, before, value)
    found, *others = sorted(alike.values(), key=lambda value: len(value.values))
    for other in (*others, *plain):
        found = applied(np.maximum, found, other)
    return found


def ceil_div(amount: Any, parts: Any) -> Any:
    """``amount / parts`` rounded up: what the fullest of ``parts`` ranks holds."""
    return -(-amount // parts)


def where(condition: Any, then: Any, otherwise: Any) -> Any:
    """``then`` where the condition holds, element by element if it is an array.

    Two named tuples of a kind give one of that kind, field by field.
    """
    if condition is True:
        return then
    if condition is False:
        return otherwise
    if not isinstance(condition, _ARRAY):
        return then if condition else otherwise
    if isinstance(then, tuple):
        return _made(then, (where(condition, *pair) for pair in zip(then, otherwise, strict=True)))
    if then is otherwise:
        return then
    if condition.__class__ is Column or then.__class__ is Column or otherwise.__class__ is Column:
        return together(np.where, condition, then, otherwise)
    return np.where(condition, then, otherwise)


def holds(condition: Any) -> bool:
    """Whether a condition that is the same in all rows of an array holds."""
    return condition if isinstance(condition, bool) else bool(condition.all())


def fullest(rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The row whose first number is largest, the first of several; element by element if any is an array."""
    found = rows[0]
    for row in rows[1:]:
        fuller = row[0] > found[0]
        if fuller is True:
            found = row
        elif fuller is not False:
            found = where(fuller, row, found)
    return found


def looked_up(function: Callable[..., Any], *numbers: Any) -> Any:
    """``function(*numbers)``, which takes plain numbers only, called once for each distinct row of arrays.

    For what is counted tensor by tensor: of thousands of plans few differ in the degrees that it depends on.
    It returns a number, or a named tuple of numbers, whose fields become arrays. What a ``partial`` binds is
    hashable: then many questions are asked once.
    """
    if ARRAYS.isdisjoint(map(type, numbers)):
        return function(*numbers)
    if Column in map(type, numbers):
        return distinct_rows.looked_up(function, *numbers)
    columns = np.stack(np.broadcast_arrays(*numbers))
    distinct, places = np.unique(columns, axis=1, return_inverse=True)
    places = places.reshape(-1)
    answers = [function(*(int(number) for number in row)) for row in distinct.T]
    return distinct_rows.each_field(answers, lambda field: np.array(field)[places])


def _made(like: tuple[Any, ...], fields: Iterable[Any]) -> Any:
    """A tuple of the same kind, named or plain."""
    return getattr(type(like), "_make", tuple)(fields)
