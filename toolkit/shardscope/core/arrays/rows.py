"""The rows of a table by the keys that decide their numbers (``column.py``): which of them agree in what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.core.arrays.column import Column
from shardscope.core.arrays.deduplicate import Distinct, Index, distinct, in_order

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Rows:
    """The rows of a table by their keys: small whole numbers, one array for each key, shape ``(rows,)``.

    Rows may come in groups, which have keys of their own; these are then the first.
    """

    def __init__(
        self,
        keys: Sequence[NDArray[np.int64]],
        groups: Distinct | None = None,
        keys_of_groups: Sequence[NDArray[np.int64]] = (),
    ) -> None:
        self.num_rows = len(keys[0])
        self._all_differ = False
        self._each = Index(Distinct(self.num_rows, *2 * [np.arange(self.num_rows)]))
        """Tells all rows apart, in their order."""
        self._groups = None if groups is None else Index(groups)
        self._of_groups = (1 << len(keys_of_groups)) - 1
        """The keys that tell groups apart, all together."""
        bases = [*(self._groups for _ in keys_of_groups), *(None for _ in keys)]
        self._indices: dict[int, Index] = {}
        self._decided: dict[int, int] = {}
        """Of the keys of each index all keys that these decide."""
        self._deciding: list[tuple[int, int]] = []
        """Keys that were made of others, each with those."""
        for bit, (codes, base) in enumerate(zip((*keys_of_groups, *keys), bases, strict=True)):
            self._keep(1 << bit, Index(distinct(codes, int(codes.max()) + 1), base))
        self.known: dict[tuple[Any, ...], Any] = {}
        """What was computed, by the operation and the numbers of the columns in it."""
        self._joined: dict[tuple[int, int], tuple[int, Any, Any]] = {}
        self._told: dict[tuple[int, bytes], int] = {}
        self._partitions: dict[bytes, int] = {}

    @classmethod
    def one_by_one(cls, number: int) -> Rows:
        """So many rows, whose one key (1) tells them all apart: nobody looks which agree in what."""
        rows = cls([np.arange(number)])
        rows._all_differ = True
        return rows

    def column(self, keys: int, values: NDArray[Any]) -> Any:
        """A column of each row's ``values``, alike where ``keys`` (bits) are; a number if all are one."""
        return self._column(keys, values[self._index(keys).rows])

    def column_of_groups(self, keys: int, values: NDArray[Any]) -> Any:
        """The same of each group's ``values``."""
        assert self._groups is not None
        return self._column(keys, values[self._groups.codes[self._index(keys).rows]])

    def _column(self, keys: int, found: NDArray[Any]) -> Any:
        return found[0].item() if len(found) and (found == found[0]).all() else Column(self, keys, found)

    def forget(self) -> None:
        """Keeps nothing of what was computed: it stays right, and takes its time again."""
        self.known.clear()

    def regrouped(self, keys: int, codes: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
        """A key that tells apart what ``codes`` of the distinct rows of ``keys`` do, and no more.

        And for each of its own distinct rows one of those of ``keys``.
        """
        if self._all_differ:
            return keys, np.arange(self.num_rows)
        told = keys, codes.tobytes()
        found = self._told.get(told)
        index = self._index(keys)
        if found is None:
            own = Index(distinct(codes, int(codes.max()) + 1), index)
            if own.number == index.number:
                self._told[told] = keys
                return keys, np.arange(index.number)
            fresh = 1 << max(self._indices).bit_length()
            found = self._partitions.setdefault(in_order(own).tobytes(), fresh)
            if found == fresh:
                self._keep(found, own)
            self._told[told] = found
            self._deciding.append((found, keys))
            for given, decided in self._decided.items():
                if decided & keys == keys:
                    self._decided[given] |= found
        return found, index.at(self._index(found))

    def spread(self, value: Any) -> NDArray[Any]:
        """A column, or a number, row by row, shape ``(rows,)``: not to be written to."""
        if isinstance(value, Column):
            index = self._index(value.keys)
            return value.values if index is self._each else value.values.take(index.codes, mode="clip")
        return np.full(self.num_rows, value)

    def joined(self, left: int, right: int) -> tuple[int, Any, Any]:
        """The keys of both, and for its distinct rows the place in either; None where they are in order."""
        found = self._joined.get((left, right))
        if found is None:
            found = self._joined[left, right] = self._join(left, right)
        return found

    def _join(self, left: int, right: int) -> tuple[int, Any, Any]:
        whole = left | right
        one, other = self._index(left), self._index(right)
        if one is other:
            return left, None, None
        # Keys that decide the others are enough: no new rows, no new order.
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

    def _index(self, keys: int) -> Index:
        found = self._indices.get(keys)
        if found is None:
            low = keys & -keys
            found = self._both(keys ^ low, low)
        return found

    def _both(self, left: int, right: int) -> Index:
        """The distinct rows of the keys of both, found among those of the fewest that tell them apart."""
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
            if index.number == finest.number:  # it tells apart all that there is to be told apart
                return self._keep(whole, index)
        pairs = (
            one.codes * other.number + other.codes
            if base is None
            else one.at(base) * other.number + other.at(base)
        )
        told = distinct(pairs, one.number * other.number)
        # What tells as many apart tells the same apart, and has an order: two would be brought into one
        # again and again.
        same = (index for index in (finest, one, other) if index.number == told.number)
        return self._keep(whole, next(same, None) or Index(told, base))

    def _keep(self, keys: int, index: Index) -> Index:
        self._indices[keys] = index
        decided = keys
        for made, of in self._deciding:
            if decided & of == of:
                decided |= made
        self._decided[keys] = decided
        return index
