"""Distinct values of arrays and rows of several columns: integer codes that are equal where these are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.ops import Scalar

_SPARSE = 64
"""Largest ratio of possible codes to rows for which :func:`find_distinct` uses a lookup table, not a sort."""


class Distinct(NamedTuple):
    """The distinct values of an array of codes."""

    number: int
    """Count of distinct values."""
    codes: NDArray[np.int64]
    """Index of each element's distinct value, shape ``(elements,)``."""
    rows: NDArray[np.int64]
    """Index of one element that has each distinct value, shape ``(number,)``."""


def find_distinct(codes: NDArray[np.int64], limit: int) -> Distinct:
    """Return the distinct values of ``codes``, integers in ``[0, limit)``."""
    if limit > _SPARSE * len(codes) + 1024:
        _, first, indices = np.unique(codes, return_index=True, return_inverse=True)
        return Distinct(len(first), indices.reshape(-1), first)
    is_present = np.zeros(limit, bool)
    is_present[codes] = True
    present = np.flatnonzero(is_present)
    distinct_codes = codes
    if len(present) < limit:
        indices = np.empty(limit, np.int64)
        indices[present] = np.arange(len(present))
        distinct_codes = indices.take(codes, mode="clip")
    rows = np.empty(len(present), np.int64)
    # numpy keeps the last write to an index: any row of a group may represent it.
    rows[distinct_codes] = np.arange(len(codes))
    return Distinct(len(present), distinct_codes, rows)


def find_distinct_rows(codes: Sequence[tuple[NDArray[np.int64], int]]) -> Distinct:
    """Return the distinct rows of several columns, each given as its codes and their count."""
    (joint, limit), *remaining = codes
    for codes_of_column, number in remaining:
        # Renumber before the product of the counts outgrows the lookup table (and, later, int64).
        if limit * number > _SPARSE * len(joint) + 1024:
            limit, joint, _ = find_distinct(joint, limit)
        joint, limit = joint * number + codes_of_column, limit * number
    return find_distinct(joint, limit)


def encode_values(values: NDArray[Scalar]) -> tuple[NDArray[np.int64], int]:
    """Return integer codes from 0 that are equal where ``values`` are, and an upper bound of their count."""
    if values.dtype == bool:
        return values.astype(np.int64), 2
    if values.dtype == np.int64:
        integers = values.astype(np.int64, copy=False)
        low = integers.min()
        limit = int(integers.max() - low) + 1
        # Within a small range the values themselves are codes; np.unique would sort.
        if limit <= 4 * len(integers) + 64:
            return integers - low, limit
    distinct, codes = np.unique(values, return_inverse=True)
    return codes.reshape(-1), len(distinct)
