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
    """Index into :attr:`argument_rows` for each distinct row of ``keys``."""
    argument_rows: list[tuple[Any, ...]]
    """The plain numbers of each distinct argument row."""


def map_distinct(function: Callable[..., Any], *numbers: Any) -> Any:
    """Return ``function(*numbers)``, calling the scalar function once for each distinct row of the columns.

    A named tuple of numbers becomes a named tuple of columns, nested tuples included. The results of a
    ``partial`` are cached by its function and arguments, which must be hashable.
    """
    rows, key = cache_key(_ArgumentRows, numbers)
    name = _find_cache_name(function)
    if name is not None:
        result = rows.results.get((name, *key))
        if result is not None:
            return result
    arguments = rows.results.get(key)
    if arguments is None:
        arguments = rows.results[key] = _find_argument_rows(rows, numbers)
    results = [function(*row) for row in arguments.argument_rows]
    if name is not None:
        result = rows.results[name, *key] = _build_columns(rows, arguments, results)
        return result
    inside = chain.from_iterable(results) if isinstance(results[0], tuple) else results
    # A closure is a new object on each call, so it cannot be a cache key: its results are the key.
    key = (*key, *results, *map(type, inside))
    result = rows.results.get(key)
    if result is None:
        result = rows.results[key] = _build_columns(rows, arguments, results)
    return result


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
            value_indices, different = encode_values(number.values)
            codes = codes * different + expand(rows, keys, Column(rows, number.keys, value_indices))
            limit *= different
    distinct = find_distinct(codes, limit)
    argument_rows = [
        values[distinct.rows].tolist() if isinstance(values, np.ndarray) else [values] * distinct.number
        for values in at
    ]
    return _ArgumentRows(keys, distinct.codes, list(zip(*argument_rows, strict=True)))


def _build_columns(rows: Rows, arguments: _ArgumentRows, results: list[Any]) -> Any:
    # Group argument rows with equal results, so that the result has as few distinct rows as possible.
    kinds: dict[Any, int] = {}
    kind_of = np.array([kinds.setdefault(result, len(kinds)) for result in results])[arguments.codes]
    results = list(kinds)
    if len(results) == 1:
        return results[0]
    keys, first = rows.regroup(arguments.keys, kind_of)
    kind_of = kind_of[first]

    def column(values: Sequence[Any]) -> Any:
        first = values[0]
        if values.count(first) == len(values):
            return first
        array = np.array(values)[kind_of]
        key = Column, keys, array.dtype.char, array.tobytes()
        return rows.results.setdefault(key, Column(rows, keys, array))

    return stack_fields(results, column)
