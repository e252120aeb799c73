"""The table behind the columns (``column.py``): its rows, their keys, and the distinct rows of key sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast, overload

import numpy as np

from shardscope.frameworks.distinct_values import Distinct, find_distinct
from shardscope.prediction.batch.column import CacheKey, Column, Values

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.prediction.batch.distinct_rows import ArgumentRows

T = TypeVar("T")
Indices: TypeAlias = "NDArray[np.int64] | None"
"""For each distinct row of one key set, the index of the distinct row of another; None for the identity."""


class Results(dict[CacheKey, T]):
    """Computed results by operation and operands, of which those that are no longer read can be dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._unread: dict[CacheKey, T] = {}
        """Results that have not been read since the last :meth:`drop_unread`."""

    def find(self, key: CacheKey) -> T | None:
        """Return a result; None if it is not known."""
        result = self.get(key)
        if result is None:
            result = self._unread.pop(key, None)
            if result is not None:
                self[key] = result
        return result

    def drop_unread(self) -> None:
        """Drop the results that were neither computed nor read since the last call."""
        self._unread = dict(self)
        super().clear()

    def clear(self) -> None:
        """Drop all results."""
        super().clear()
        self._unread.clear()


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


class Rows:
    """A table of plans with integer keys, one array of shape ``(rows,)`` for each key.

    A set of keys is a bit mask: bit i stands for the i-th key. Rows may be grouped (``groups``); the keys of
    groups, arrays of shape ``(groups,)``, take the lowest bits. ``results`` caches computed columns.
    """

    def __init__(
        self,
        keys: Sequence[NDArray[np.int64]],
        groups: Distinct | None = None,
        keys_of_groups: Sequence[NDArray[np.int64]] = (),
    ) -> None:
        self.num_rows = len(keys[0])
        self._all_differ = False
        self._each = Grouping(Distinct(self.num_rows, *2 * [np.arange(self.num_rows)]))
        """The grouping in which each row is its own group, in table order."""
        self._groups = None if groups is None else Grouping(groups)
        self._of_groups = (1 << len(keys_of_groups)) - 1
        """Bit mask of the keys of groups."""
        bases = [*(self._groups for _ in keys_of_groups), *(None for _ in keys)]
        self._indices: dict[int, Grouping] = {}
        self._decided: dict[int, int] = {}
        """Key set -> all keys whose values it determines (functional dependency)."""
        self._deciding: list[tuple[int, int]] = []
        """Pairs of a derived key and the keys that it was derived from."""
        # Bits in ascending order: keys of groups first, since :meth:`_combine` tests for them by a mask.
        for bit, (codes, base) in enumerate(zip((*keys_of_groups, *keys), bases, strict=True)):
            self._add_grouping(1 << bit, Grouping(find_distinct(codes, int(codes.max()) + 1), base))
        self.columns: Results[Column] = Results()
        """Cache of columns by operation and operands (``column.build_cache_key``)."""
        self.results: Results[object] = Results()
        """Cache of function results (``Column.call_cached``, ``map_distinct``) by function and arguments."""
        self.argument_rows: dict[CacheKey, ArgumentRows] = {}
        """Cache of the distinct argument rows of function calls (``distinct_rows.py``), by arguments."""
        self._joined: dict[tuple[int, int], tuple[int, Indices, Indices]] = {}
        self._regrouped: dict[tuple[int, bytes], int] = {}
        self._partitions: dict[bytes, int] = {}

    @classmethod
    def one_by_one(cls, number: int) -> Rows:
        """Return a table of ``number`` rows with one key (bit mask 1), unique to each row; none merge."""
        rows = cls([np.arange(number)])
        rows._all_differ = True
        return rows

    def build_column(self, keys: int, values: NDArray[np.int64]) -> int:
        """Return a column of ``values``, shape ``(rows,)``, which depend on ``keys``; or a number if equal.

        It is typed as an ``int``, as formulas take it.
        """
        return self._build_column(keys, values[self._group_by(keys).rows])

    def build_column_of_groups(self, keys: int, values: NDArray[np.int64]) -> int:
        """Return a column of ``values``, shape ``(groups,)``, as :meth:`build_column` does."""
        assert self._groups is not None
        return self._build_column(keys, values[self._groups.codes[self._group_by(keys).rows]])

    def _build_column(self, keys: int, values: NDArray[np.int64]) -> int:
        # A plain number keeps what depends on it alone out of the columns.
        is_constant = len(values) and (values == values[0]).all()
        return values[0].item() if is_constant else cast("int", Column(self, keys, values))

    def drop_unused_results(self) -> None:
        """Drop the results that were neither computed nor read since the last call."""
        self.columns.drop_unread()
        self.results.drop_unread()

    def clear_results(self) -> None:
        """Clear the caches of results to free memory; later calls recompute them."""
        self.columns.clear()
        self.results.clear()
        self.argument_rows.clear()

    def regroup(self, keys: int, codes: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
        """Return a key with the grouping of ``codes``, and its representatives.

        ``codes`` has one integer for each distinct row of ``keys``. The second value has, for each distinct
        row of the new key, the index of one distinct row of ``keys``. Equal groupings get the same key.
        """
        # Each row is its own value: looking for equal ones would cost time and merge nothing.
        if self._all_differ:
            return keys, np.arange(self.num_rows)
        key = keys, codes.tobytes()
        result = self._regrouped.get(key)
        index = self._group_by(keys)
        if result is None:
            grouping = Grouping(find_distinct(codes, int(codes.max()) + 1), index)
            if grouping.number == index.number:
                self._regrouped[key] = keys
                return keys, np.arange(index.number)
            # An equal grouping may exist already, derived from other keys: then both share one key.
            fresh = 1 << max(self._indices).bit_length()
            result = self._partitions.setdefault(_renumber_by_occurrence(grouping).tobytes(), fresh)
            if result == fresh:
                self._add_grouping(result, grouping)
            self._regrouped[key] = result
            # The new key follows from ``keys``: joined with them it adds no rows.
            self._deciding.append((result, keys))
            for known_keys, decided in self._decided.items():
                if decided & keys == keys:
                    self._decided[known_keys] |= result
        return result, index.map_rows_of(self._group_by(result))

    @overload
    def expand(self, value: object) -> Values: ...
    @overload
    def expand(self, value: object, dtype: type[np.int64]) -> NDArray[np.int64]: ...
    @overload
    def expand(self, value: object, dtype: type[np.float64]) -> NDArray[np.float64]: ...
    def expand(self, value: object, dtype: type[np.int64 | np.float64] | None = None) -> Values:
        """Return a column or number expanded to shape ``(rows,)``. Do not write to the result."""
        if not isinstance(value, Column):
            return np.full(self.num_rows, value, dtype)
        index = self._group_by(value.keys)
        values = value.values if index is self._each else value.values.take(index.codes, mode="clip")
        return values if dtype is None else values.astype(dtype, copy=False)

    def join(self, left: int, right: int) -> tuple[int, Indices, Indices]:
        """Return the joint keys, and for their distinct rows the indices into both sides (None: identity)."""
        result = self._joined.get((left, right))
        if result is None:
            result = self._joined[left, right] = self._join(left, right)
        return result

    def _join(self, left: int, right: int) -> tuple[int, Indices, Indices]:
        joint = left | right
        first, second = self._group_by(left), self._group_by(right)
        if first is second:
            return left, None, None
        # If one key set determines the other, its distinct rows are the joint ones.
        if self._decided[left] & right == right:
            return left, None, second.map_rows_of(first)
        if self._decided[right] & left == left and first.number < second.number:
            return right, first.map_rows_of(second), None
        both = self._indices.get(joint) or self._combine(left, right)
        if both.number == first.number:
            return left, None, second.map_rows_of(first)
        if both.number == second.number:
            return right, first.map_rows_of(second), None
        return joint, first.map_rows_of(both), second.map_rows_of(both)

    def _group_by(self, keys: int) -> Grouping:
        result = self._indices.get(keys)
        if result is None:
            # Not grouped by these keys yet: split off the lowest bit, and group the rest first.
            low = keys & -keys
            result = self._combine(keys ^ low, low)
        return result

    def _combine(self, left: int, right: int) -> Grouping:
        """Group the rows by both key sets, starting from the coarsest known grouping that is fine enough."""
        joint = left | right
        first, second = self._group_by(left), self._group_by(right & ~left)
        # Keys that both sides have may be split off on either side: choose the fewer combinations.
        if left & right:
            smaller = self._group_by(left & ~right), self._group_by(right)
            if smaller[0].number * smaller[1].number < first.number * second.number:
                first, second = smaller
        # The coarsest known grouping that determines both sides: then codes are combined for its groups only.
        base = self._groups if joint & self._of_groups == joint else None
        for keys, index in self._indices.items():
            if self._decided[keys] & joint == joint and (base is None or index.number < base.number):
                base = index
        finest = base or self._each
        for index in (first, second):
            if index.number == finest.number:  # already as fine as possible: no need to combine
                return self._add_grouping(joint, index)
        pairs = (
            first.codes * second.number + second.codes
            if base is None
            else first.map_rows_of(base) * second.number + second.map_rows_of(base)
        )
        distinct = find_distinct(pairs, first.number * second.number)
        # A known grouping with as many groups is the same grouping. Reuse it with its order: with a second
        # order, every later join would have to convert between the two.
        same = (index for index in (finest, first, second) if index.number == distinct.number)
        return self._add_grouping(joint, next(same, None) or Grouping(distinct, base))

    def _add_grouping(self, keys: int, index: Grouping) -> Grouping:
        self._indices[keys] = index
        decided = keys
        for derived, sources in self._deciding:
            if decided & sources == sources:
                decided |= derived
        self._decided[keys] = decided
        return index


def _renumber_by_occurrence(index: Grouping) -> NDArray[np.int64]:
    """Return ``index.codes`` renumbered by first occurrence, which is equal for equal groupings."""
    codes = index.codes
    first, order = np.empty(index.number, np.int64), np.empty(index.number, np.int64)
    # numpy keeps the last write to an index, so writing backwards keeps the first occurrence.
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)
    order[np.argsort(first)] = np.arange(index.number)
    return order.take(codes, mode="clip")
