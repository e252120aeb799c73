"""Columns of all ranks of a trace as one set of columns, with common names and one time axis."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from shardscope.trace.argument_blocks import EventArguments
from shardscope.trace.loading.rank_columns import RankColumns, get_rank
from shardscope.trace.marks import Marks

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class RankMerger:
    """Merger of the columns of all ranks into one, with common names and times."""

    def __init__(self, ranks: list[RankColumns], shifts: list[int], origin_ns: int | None) -> None:
        self._ranks = ranks
        self._shifts = shifts
        begins: list[int] = []
        for rank, shift in zip(ranks, shifts, strict=True):
            if len(rank.slices["start_ns"]) and origin_ns is None:
                begins.append(int(rank.slices["start_ns"].min()) - shift)
            # One by one: together, the times of thousands of steps on hundreds of ranks have gigabytes.
            rank.release()
        self.origin_ns = min(begins, default=0) if origin_ns is None else origin_ns
        names: dict[str, int] = {}
        categories: dict[str, int] = {}
        num_tracks = 0
        self._maps: list[dict[str, Int32s]] = []
        for rank in ranks:
            texts = rank.texts
            self._maps.append(
                {
                    "name": _index_texts(texts.names, names),
                    "category": _index_texts(texts.categories, categories),
                    "track": np.append(num_tracks + np.arange(len(texts.tracks)), -1).astype(np.int32),
                }
            )
            num_tracks += len(texts.tracks)
        self.names, self.categories = list(names), list(categories)

    @property
    def num_slices(self) -> int:
        return sum(len(rank.slices["row"]) for rank in self._ranks)

    def select(self, numbers: set[int]) -> tuple[list[RankColumns], list[str], list[int]]:
        """Return ranks by number, no notes, and their shifts."""
        chosen = [position for position, rank in enumerate(self._ranks) if get_rank(rank) in numbers]
        return [self._ranks[position] for position in chosen], [], [self._shifts[one] for one in chosen]

    def release(self) -> None:
        """Give memory of mapped columns back to the system."""
        for rank in self._ranks:
            rank.release()

    def merge_times(self, kind: Literal["slices", "marks"] = "slices") -> Int64s:
        """Return the times of all ranks from the trace's first slice."""
        return np.concatenate(
            [
                getattr(rank, kind)["start_ns"] - (shift + self.origin_ns)
                for rank, shift in zip(self._ranks, self._shifts, strict=True)
            ]
        )

    def merge(self, kind: Literal["slices", "marks"], column: str) -> npt.NDArray[np.int64]:
        """Return one column of all ranks."""
        parts = []
        for rank, maps in zip(self._ranks, self._maps, strict=True):
            values = getattr(rank, kind)[column]
            if column in maps and len(values):
                index = maps[column]
                # One rank, or the first one: indices stay as they are.
                same = bool(np.array_equal(index, np.arange(len(index))))
                values = values if same else index.astype(values.dtype)[values]
            parts.append(values)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def merge_arguments(self, kind: Literal["slices", "marks"]) -> EventArguments:
        """Return the arguments of all ranks."""
        counts = [len(getattr(rank, kind)["row"]) for rank in self._ranks]
        bounds = np.concatenate(([0], np.cumsum(counts)))
        return EventArguments([rank.arguments for rank in self._ranks], bounds, self.merge(kind, "row"))

    def merge_marks(self) -> Marks:
        """Return the marks of all ranks."""
        keys = [key for rank in self._ranks for key in rank.texts.keys]
        first_keys = np.cumsum([0, *(len(rank.texts.keys) for rank in self._ranks)])
        counts = [len(rank.marks["row"]) for rank in self._ranks]
        rank_position = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
        return Marks(
            phase=self.merge("marks", "phase").astype(np.int16, copy=False),
            time_ns=self.merge_times("marks"),
            name_index=self.merge("marks", "name").astype(np.int32, copy=False),
            category_index=self.merge("marks", "category").astype(np.int32, copy=False),
            rank_position=rank_position,
            track_index=self.merge("marks", "track").astype(np.int32, copy=False),
            key_index=(self.merge("marks", "key") + first_keys[rank_position]).astype(np.int32),
            id=self.merge("marks", "id"),
            arguments=self.merge_arguments("marks"),
            keys=keys,
        )


def _index_texts(texts: list[str], known: dict[str, int]) -> Int32s:
    """Return the index of each text in ``known``, to which new ones are added."""
    return np.array([known.setdefault(text, len(known)) for text in texts], np.int32)
