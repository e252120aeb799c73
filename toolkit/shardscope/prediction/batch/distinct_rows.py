"""Evaluation of scalar functions on columns (``column.py``), once for each distinct row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar, TypeVarTuple, cast

import numpy as np

from shardscope.core.ops import stack_fields
from shardscope.frameworks.distinct_values import encode_values, find_distinct
from shardscope.prediction.batch.column import (
    CacheKey,
    Column,
    build_cache_key,
    expand_operand,
    join_keys,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.prediction.batch.rows import Rows

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class ArgumentRows(NamedTuple):
    """The distinct argument rows of one function call on columns."""

    keys: int
    codes: NDArray[np.int64]
    """Index into :attr:`argument_rows` for each distinct row of ``keys``."""
    argument_rows: list[tuple[object, ...]]
    """The plain numbers of each distinct argument row."""


def map_distinct(function: Callable[[*Ts], T], *numbers: *Ts) -> T:
    """Return ``function(*numbers)``, calling the scalar function once for each distinct row of the columns.

    A named tuple of numbers becomes a named tuple of columns, nested tuples included. The results of a
    ``partial`` are cached by its function and arguments, which must be hashable.
    """
    rows, key = build_cache_key(ArgumentRows, numbers)
    function_key = _build_function_key(function)
    if function_key is not None:
        known = rows.results.find((function_key, *key))
        if known is not None:
            return cast("T", known)
    arguments = rows.argument_rows.get(key)
    if arguments is None:
        arguments = rows.argument_rows[key] = _find_argument_rows(rows, numbers)
    results = [function(*cast("tuple[*Ts]", row)) for row in arguments.argument_rows]
    if function_key is not None:
        key = (function_key, *key)
    else:
        # A closure is a new object on each call, so it cannot be a cache key: its results are the key. Their
        # types are part of it, because 1, 1.0 and True compare equal.
        fields = chain.from_iterable(result if isinstance(result, tuple) else (result,) for result in results)
        key = (*key, *results, *map(type, fields))
    result = rows.results.find(key)
    if result is None:
        result = rows.results[key] = _build_columns(rows, arguments, results)
    return cast("T", result)


def _build_function_key(function: object) -> Hashable:
    """Return the cache key of a function; None for closures and functions with bound defaults."""
    if isinstance(function, partial):
        return function.func, function.args, *function.keywords.items()
    # The values that a closure or a default binds are not part of the code object.
    if getattr(function, "__closure__", None) or getattr(function, "__defaults__", None):
        return None
    return getattr(function, "__code__", function)


def _find_argument_rows(rows: Rows, numbers: Sequence[object]) -> ArgumentRows:
    keys = join_keys(numbers)
    # Combine the value codes of all columns into one code per row, in mixed radix.
    codes, limit = np.zeros(1, np.int64), 1
    operands: list[object] = []
    for number in numbers:
        operands.append(expand_operand(rows, keys, number))
        if isinstance(number, Column):
            value_codes, num_codes = encode_values(number.values)
            expanded = expand_operand(rows, keys, Column(rows, number.keys, value_codes))
            codes = codes * num_codes + cast("NDArray[np.int64]", expanded)
            limit *= num_codes
    distinct = find_distinct(codes, limit)
    arguments = [
        values[distinct.rows].tolist() if isinstance(values, np.ndarray) else [values] * distinct.number
        for values in operands
    ]
    return ArgumentRows(keys, distinct.codes, list(zip(*arguments, strict=True)))


def _build_columns(rows: Rows, arguments: ArgumentRows, results: Sequence[object]) -> object:
    # Group argument rows with equal results, so that the result has as few distinct rows as possible.
    kinds: dict[object, int] = {}
    kind_of = np.array([kinds.setdefault(result, len(kinds)) for result in results])[arguments.codes]
    distinct_results = list(kinds)
    if len(distinct_results) == 1:
        return distinct_results[0]
    keys, first = rows.regroup(arguments.keys, kind_of)
    kind_of = kind_of[first]

    def build_column(values: Sequence[object]) -> object:
        if values.count(values[0]) == len(values):
            return values[0]
        array = np.array(values)[kind_of]
        # Equal columns of different functions are one column, so that sums of them are computed once.
        key: CacheKey = Column, keys, array.dtype.char, array.tobytes()
        column = rows.columns.find(key)
        if column is None:
            column = rows.columns[key] = Column(rows, keys, array)
        return column

    return stack_fields(distinct_results, build_column)
