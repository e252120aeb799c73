"""Groupings of a table's rows by the values of some keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.frameworks.distinct_values import Distinct


class Grouping:
    """Grouping of a table's rows by the values of some keys."""

    __slots__ = ("_codes", "base", "number", "rows", "within")

    rows: NDArray[np.int64]

    def __init__(self, within: Distinct, base: Grouping | None = None) -> None:
        self.number = within.number
        """Count of distinct rows."""
        self.rows = within.rows if base is None else base.rows.take(within.rows, mode="clip")
        """One table row for each distinct row."""
        self.within, self.base = within.codes, base
        """Index of each ``base`` row's distinct row. ``base`` is an equal or finer grouping."""
        self._codes = within.codes if base is None else None

    @property
    def codes(self) -> NDArray[np.int64]:
        """Index of each table row's distinct row."""
        if self._codes is None:
            assert self.base is not None
            self._codes = self.within.take(self.base.codes, mode="clip")
        return self._codes

    def map_rows_of(self, other: Grouping) -> NDArray[np.int64]:
        """Return the index of the distinct row here for each distinct row of ``other``."""
        if self.base is other:
            return self.within
        if self._codes is None and self.base is not None:
            return self.within.take(self.base.map_rows_of(other), mode="clip")
        return self.codes.take(other.rows, mode="clip")


def renumber_by_occurrence(index: Grouping) -> NDArray[np.int64]:
    """Return ``index.codes`` renumbered by first occurrence, which is equal for equal groupings."""
    codes = index.codes
    first, order = np.empty(index.number, np.int64), np.empty(index.number, np.int64)
    # numpy keeps the last write to an index, so writing backwards keeps the first occurrence.
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)
    order[np.argsort(first)] = np.arange(index.number)
    return order.take(codes, mode="clip")
