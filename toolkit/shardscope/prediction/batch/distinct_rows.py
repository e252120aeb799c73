"""Evaluation of scalar functions on columns (``column.py``), once for each distinct row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardscope.core.ops import stack_fields
from shardscope.prediction.batch.column import Column, cache_key, expand, joint_keys
from shardscope.prediction.batch.deduplicate import encode_values, find_distinct

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.prediction.batch.rows import Rows


class _ArgumentRows(NamedTuple):
    """The distinct argument rows of one function call on columns."""

    keys: int
    codes: NDArray[np.int64]
    """Index into :attr:`each` for each distinct row of ``keys``."""
    each: list[tuple[Any, ...]]
    """The plain numbers of each distinct argument row."""


def map_distinct(function: Callable[..., Any], *numbers: Any) -> Any:
    """Return ``function(*numbers)``, calling the scalar function once for each distinct row of the columns.

    A named tuple of numbers becomes a named tuple of columns, nested tuples included. The results of a
    ``partial`` are cached by its function and arguments, which must be hashable.
    """
    rows, key = cache_key(_ArgumentRows, numbers)
    name = _find_cache_name(function)
    if name is not None:
        found = rows.known.get((name, *key))
        if found is not None:
            return found
    asked = rows.known.get(key)
    if asked is None:
        asked = rows.known[key] = _find_argument_rows(rows, numbers)
    answers = [function(*row) for row in asked.each]
    if name is not None:
        found = rows.known[name, *key] = _build_columns(rows, asked, answers)
        return found
    inside = chain.from_iterable(answers) if isinstance(answers[0], tuple) else answers
    # A closure is a new object on each call, so it cannot be a cache key: its results are the key.
    told = (*key, *answers, *map(type, inside))
    found = rows.known.get(told)
    if found is None:
        found = rows.known[told] = _build_columns(rows, asked, answers)
    return found


def _find_cache_name(function: Any) -> Any:
    """Return the cache key of a function; None for closures and functions with bound defaults."""
    if type(function) is partial:
        return function.func, function.args, *function.keywords.items()
    if getattr(function, "__closure__", None) or getattr(function, "__defaults__", None):
        return None
    return getattr(function, "__code__", function)


def _find_argument_rows(rows: Rows, numbers: Sequence[Any]) -> _ArgumentRows:
    keys = joint_keys(numbers)
    # Combine the value codes of all columns into one code per row, in mixed radix.
    codes, limit, at = np.zeros(1, np.int64), 1, []
    for number in numbers:
        values = expand(rows, keys, number)
        at.append(values)
        if type(number) is Column:
            places, different = encode_values(number.values)
            codes = codes * different + expand(rows, keys, Column(rows, number.keys, places))
            limit *= different
    found = find_distinct(codes, limit)
    each = [
        values[found.rows].tolist() if isinstance(values, np.ndarray) else [values] * found.number
        for values in at
    ]
    return _ArgumentRows(keys, found.codes, list(zip(*each, strict=True)))


def _build_columns(rows: Rows, asked: _ArgumentRows, answers: list[Any]) -> Any:
    # Group argument rows with equal results, so that the result has as few distinct rows as possible.
    kinds: dict[Any, int] = {}
    kind_of = np.array([kinds.setdefault(answer, len(kinds)) for answer in answers])[asked.codes]
    answers = list(kinds)
    if len(answers) == 1:
        return answers[0]
    keys, first = rows.regrouped(asked.keys, kind_of)
    kind_of = kind_of[first]

    def column(values: Sequence[Any]) -> Any:
        first = values[0]
        if values.count(first) == len(values):
            return first
        array = np.array(values)[kind_of]
        told = Column, keys, array.dtype.char, array.tobytes()
        return rows.known.setdefault(told, Column(rows, keys, array))

    return stack_fields(answers, column)
