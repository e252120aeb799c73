"""Operations for formulas that accept one plan's numbers or the arrays of many plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from shardscope.core.arrays import column, distinct_rows
from shardscope.core.arrays.column import ARRAYS, Column, applied, remembering, together

_ARRAY: Any = (np.ndarray, Column)


def is_array(value: Any) -> bool:
    """Return whether ``value`` holds the numbers of many plans."""
    return isinstance(value, _ARRAY)


def by_value(number: Any) -> Any:
    """Return the number, and a column re-keyed by its own distinct values.

    Use it where only the value matters from here on. Tokens per rank, for example, are the product of the
    micro-batch size and the sequence length per rank: quantities that depend on tokens are then computed once
    for all plans with equal tokens.
    """
    return column.by_value(number) if number.__class__ is Column else number


def smallest(first: Any, second: Any) -> Any:
    """Return the smaller of two, element by element if either is an array."""
    if first.__class__ is Column:
        return applied(np.minimum, first, second)
    if second.__class__ is Column:
        return applied(np.minimum, second, first)
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return np.minimum(first, second)
    return first if first <= second else second


def largest(first: Any, *others: Any) -> Any:
    """Return the largest value, element by element if any is an array."""
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
    """Return the maximum. Columns with equal keys are compared first, because they have the fewest rows."""
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
    """Return ``amount / parts`` rounded up, the share of the fullest of ``parts`` ranks."""
    return -(-amount // parts)


def where(condition: Any, then: Any, otherwise: Any) -> Any:
    """Return ``then`` where the condition is true, else ``otherwise``; element by element for an array.

    Two named tuples of one type give a named tuple of that type, field by field.
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
    """Return whether a condition is true, in all rows if it is an array."""
    return condition if isinstance(condition, bool) else bool(condition.all())


def fullest(rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the row with the largest first number (the earliest on ties), element by element for arrays."""
    found = rows[0]
    for row in rows[1:]:
        fuller = row[0] > found[0]
        if fuller is True:
            found = row
        elif fuller is not False:
            found = where(fuller, row, found)
    return found


def looked_up(function: Callable[..., Any], *numbers: Any) -> Any:
    """Return ``function(*numbers)``, calling the scalar function once for each distinct row of the arrays.

    Use it for quantities that are counted tensor by tensor: thousands of plans have few distinct degrees.
    ``function`` returns a number, or a named tuple of numbers whose fields become arrays. Pass a ``partial``
    with hashable arguments to have the results cached.
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
    """Return a tuple of the type of ``like``, named or plain."""
    return getattr(type(like), "_make", tuple)(fields)
