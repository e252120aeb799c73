"""Which rows of a table are alike: whole numbers that stand for what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SPARSE = 64
"""Rows are told apart by a table of all combinations as long as these are so many times the rows at most."""


class Distinct(NamedTuple):
    """Which of some numbers are alike."""

    number: int
    """Distinct ones."""
    codes: NDArray[np.int64]
    """Of each which of these it is."""
    rows: NDArray[np.int64]
    """Of each of these where one is."""


class Index:
    """How rows agree in some keys."""

    __slots__ = ("_codes", "base", "number", "rows", "within")

    rows: NDArray[np.int64]

    def __init__(self, within: Distinct, base: Index | None = None) -> None:
        self.number = within.number
        """Distinct rows."""
        self.rows = within.rows if base is None else base.rows.take(within.rows, mode="clip")
        """Of each of these one row."""
        self.within, self.base = within.codes, base
        """Of each distinct row of ``base``, which tells apart all that this does, which of these it is."""
        self._codes = within.codes if base is None else None

    @property
    def codes(self) -> NDArray[np.int64]:
        """Of each row which of these it is."""
        if self._codes is None:
            assert self.base is not None
            self._codes = self.within.take(self.base.codes, mode="clip")
        return self._codes

    def at(self, other: Index) -> NDArray[np.int64]:
        """Of each distinct row of ``other`` which of these it is."""
        if self.base is other:
            return self.within
        if self._codes is None and self.base is not None:
            return self.within.take(self.base.at(other), mode="clip")
        return self.codes.take(other.rows, mode="clip")


def in_order(index: Index) -> NDArray[np.int64]:
    """Of each row which of these it is, numbered as they come: the same however they were found."""
    codes = index.codes
    first, order = np.empty(index.number, np.int64), np.empty(index.number, np.int64)
    # Of several rows the last that is written stays.
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)
    order[np.argsort(first)] = np.arange(index.number)
    return order.take(codes, mode="clip")


def distinct(codes: NDArray[np.int64], limit: int) -> Distinct:
    """Which of ``codes`` (0 to below ``limit``) are alike."""
    if limit > _SPARSE * len(codes) + 1024:
        _, first, places = np.unique(codes, return_index=True, return_inverse=True)
        return Distinct(len(first), places.reshape(-1), first)
    there = np.zeros(limit, bool)
    there[codes] = True
    present = np.flatnonzero(there)
    found = codes
    if len(present) < limit:
        places = np.empty(limit, np.int64)
        places[present] = np.arange(len(present))
        found = places.take(codes, mode="clip")
    rows = np.empty(len(present), np.int64)
    # Of several rows the last that is written stays.
    rows[found] = np.arange(len(codes))
    return Distinct(len(present), found, rows)


def rows_alike(codes: Sequence[tuple[NDArray[np.int64], int]]) -> Distinct:
    """Which rows are alike in several numbers, of which each has its codes and how many these are."""
    (found, limit), *others = codes
    for own, number in others:
        if limit * number > _SPARSE * len(found) + 1024:
            limit, found, _ = distinct(found, limit)
        found, limit = found * number + own, limit * number
    return distinct(found, limit)


def value_codes(values: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
    """Which of ``values`` are alike, as whole numbers from 0, and how many these are."""
    if values.dtype == bool:
        return values.astype(np.int64), 2
    if values.dtype == np.int64:
        low = values.min()
        limit = int(values.max() - low) + 1
        if limit <= 4 * len(values) + 64:
            return values - low, limit
    own, codes = np.unique(values, return_inverse=True)
    return codes.reshape(-1), len(own)
