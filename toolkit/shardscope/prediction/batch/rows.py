"""The table behind the columns (``column.py``): its rows, their keys, and the distinct rows of key sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.prediction.batch.column import Column
from shardscope.prediction.batch.deduplicate import Distinct, Grouping, find_distinct, renumber_by_occurrence

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Rows:
    """A table of plans with integer keys, one array of shape ``(rows,)`` for each key.

    A set of keys is a bit mask: bit i stands for the i-th key. Rows may be grouped (``groups``); the keys of
    groups, arrays of shape ``(groups,)``, take the lowest bits. ``known`` caches computed columns.
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
        for bit, (codes, base) in enumerate(zip((*keys_of_groups, *keys), bases, strict=True)):
            self._keep(1 << bit, Grouping(find_distinct(codes, int(codes.max()) + 1), base))
        self.known: dict[tuple[Any, ...], Any] = {}
        """Cache of results by operation and operands (``column.question``)."""
        self._joined: dict[tuple[int, int], tuple[int, Any, Any]] = {}
        self._told: dict[tuple[int, bytes], int] = {}
        self._partitions: dict[bytes, int] = {}

    @classmethod
    def one_by_one(cls, number: int) -> Rows:
        """Return a table of ``number`` rows with one key (bit mask 1), unique to each row; none merge."""
        rows = cls([np.arange(number)])
        rows._all_differ = True
        return rows

    def column(self, keys: int, values: NDArray[Any]) -> Any:
        """Return a column of ``values``, shape ``(rows,)``, which depend on ``keys``; a number if equal."""
        return self._column(keys, values[self._index(keys).rows])

    def column_of_groups(self, keys: int, values: NDArray[Any]) -> Any:
        """Return a column of ``values``, shape ``(groups,)``, as :meth:`column` does."""
        assert self._groups is not None
        return self._column(keys, values[self._groups.codes[self._index(keys).rows]])

    def _column(self, keys: int, found: NDArray[Any]) -> Any:
        return found[0].item() if len(found) and (found == found[0]).all() else Column(self, keys, found)

    def forget(self) -> None:
        """Clear the cache of results to free memory; later calls recompute them."""
        self.known.clear()

    def regrouped(self, keys: int, codes: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
        """Return a key with the grouping of ``codes``, and its representatives.

        ``codes`` has one integer for each distinct row of ``keys``. The second value has, for each distinct
        row of the new key, the index of one distinct row of ``keys``. Equal groupings get the same key.
        """
        if self._all_differ:
            return keys, np.arange(self.num_rows)
        told = keys, codes.tobytes()
        found = self._told.get(told)
        index = self._index(keys)
        if found is None:
            own = Grouping(find_distinct(codes, int(codes.max()) + 1), index)
            if own.number == index.number:
                self._told[told] = keys
                return keys, np.arange(index.number)
            # An equal grouping may exist already, derived from other keys: then both share one key.
            fresh = 1 << max(self._indices).bit_length()
            found = self._partitions.setdefault(renumber_by_occurrence(own).tobytes(), fresh)
            if found == fresh:
                self._keep(found, own)
            self._told[told] = found
            self._deciding.append((found, keys))
            for given, decided in self._decided.items():
                if decided & keys == keys:
                    self._decided[given] |= found
        return found, index.at(self._index(found))

    def spread(self, value: Any) -> NDArray[Any]:
        """Return a column or number expanded to shape ``(rows,)``. Do not write to the result."""
        if isinstance(value, Column):
            index = self._index(value.keys)
            return value.values if index is self._each else value.values.take(index.codes, mode="clip")
        return np.full(self.num_rows, value)

    def joined(self, left: int, right: int) -> tuple[int, Any, Any]:
        """Return the joint keys, and for their distinct rows the indices into both sides (None: identity)."""
        found = self._joined.get((left, right))
        if found is None:
            found = self._joined[left, right] = self._join(left, right)
        return found

    def _join(self, left: int, right: int) -> tuple[int, Any, Any]:
        whole = left | right
        one, other = self._index(left), self._index(right)
        if one is other:
            return left, None, None
        # If one key set determines the other, its distinct rows are the joint ones.
        if self._decided[left] & right == right:
            return left, None, other.at(one)
        if self._decided[right] & left == left and one.number < other.number:
            return right, one.at(other), None
        both = self._indices.get(whole) or self._both(left, right)
        if both.number == one.number:
            return left, None, other.at(one)
        if both.number == other.number:
            return right, one.at(other), None
        return whole, one.at(both), other.at(both)

    def _index(self, keys: int) -> Grouping:
        found = self._indices.get(keys)
        if found is None:
            low = keys & -keys
            found = self._both(keys ^ low, low)
        return found

    def _both(self, left: int, right: int) -> Grouping:
        """Group the rows by both key sets, starting from the coarsest known grouping that is fine enough."""
        whole = left | right
        one, other = self._index(left), self._index(right & ~left)
        if left & right:
            less = self._index(left & ~right), self._index(right)
            if less[0].number * less[1].number < one.number * other.number:
                one, other = less
        base = self._groups if whole & self._of_groups == whole else None
        for keys, index in self._indices.items():
            if self._decided[keys] & whole == whole and (base is None or index.number < base.number):
                base = index
        finest = base or self._each
        for index in (one, other):
            if index.number == finest.number:  # already as fine as possible: no need to combine
                return self._keep(whole, index)
        pairs = (
            one.codes * other.number + other.codes
            if base is None
            else one.at(base) * other.number + other.at(base)
        )
        told = find_distinct(pairs, one.number * other.number)
        # A known grouping with as many groups is the same grouping. Reuse it with its order: with a second
        # order, every later join would have to convert between the two.
        same = (index for index in (finest, one, other) if index.number == told.number)
        return self._keep(whole, next(same, None) or Grouping(told, base))

    def _keep(self, keys: int, index: Grouping) -> Grouping:
        self._indices[keys] = index
        decided = keys
        for made, of in self._deciding:
            if decided & of == of:
                decided |= made
        self._decided[keys] = decided
        return index
