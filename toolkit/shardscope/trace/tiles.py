"""Tiles of a trace for display: marks of one time range at one pixel width, as binary columns.

Slices narrower than a pixel are merged, so the number of marks depends on the width of the screen, not on the
length of the trace. Zooming requests a new tile.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from shardscope.trace.categories import WRAPPER_CATEGORIES
from shardscope.trace.nesting import mark_recursive_calls
from shardscope.trace.store import Trace
from shardscope.trace.table import Table

# Indices of the colors in colours.js of the Trace view.
NUM_HUES = 6
MUTED, COMMUNICATION, FIRST_HUE = 0, 1, 2

MAX_WIDTH = 16_384

COMMUNICATION_NAMES = re.compile(
    r"nccl|rccl|multimem_|\bgloo\b|c10d|record_param_comms|deep_?ep|nvshmem|mscclpp|oneccl|\bhccl\b",
    re.IGNORECASE,
)
"""Names that are drawn in the color of communication, calls on the CPU included."""

Column = npt.NDArray[np.float64 | np.int64 | np.int32 | np.uint8 | np.bool_]


class NameTotals(TypedDict):
    """Slices and seconds of one name."""

    name: str
    slices: int
    self_seconds: float
    total_seconds: float


@dataclass(frozen=True, kw_only=True)
class AreaTotals:
    """Totals of an interval on some tracks."""

    names: Table[NameTotals]
    categories: Table[NameTotals]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Marks of some or all rows between two times, by row and time.

    ``columns``: ``start`` and ``duration`` (nanoseconds), ``first`` (first slice), ``count`` (slices),
    ``index`` (the slice that names it), ``name``, ``colour``, ``density`` (share that slices cover, of 255),
    ``match``; and ``row_first``, where the marks of each row begin, with their number as last entry.
    """

    t0_ns: float
    t1_ns: float
    columns: dict[str, Column]

    @property
    def num_marks(self) -> int:
        """Number of rectangles to draw."""
        return len(self.columns["start"])


def pack_columns(columns: Mapping[str, Column], kinds: Sequence[tuple[str, str]]) -> list[memoryview]:
    """Return the bytes of columns, in the order and types of ``kinds``."""
    return [
        memoryview(columns[name].astype(kind).data).cast("B") if len(columns[name]) else memoryview(b"")
        for name, kind in kinds
    ]


class Tiler:
    """Creator of tiles and totals of one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.end_ns = trace.end_ns
        self.first_row_of_track = trace.first_row_of_track
        self.num_rows = int(self.first_row_of_track[-1])
        row = (
            self.first_row_of_track[:-1][trace.track_index] + trace.depth
            if len(trace)
            else np.zeros(0, np.int64)
        )
        self.row_bounds = np.searchsorted(row, np.arange(self.num_rows + 1))
        self.row = row.astype(np.int32)
        self.name_colour = _choose_colours(trace)

    def find_matches(self, text: str) -> npt.NDArray[np.bool_]:
        """Return a mask of slices with ``text`` in their name, case-insensitive; all False for empty text."""
        query = text.casefold().strip()
        if not query or not len(self.trace):
            return np.zeros(len(self.trace), dtype=bool)
        names = np.array([query in name.casefold() for name in self.trace.names], dtype=bool)
        return np.asarray(names[self.trace.name_index])

    def build_tile(
        self,
        t0_ns: float,
        t1_ns: float,
        width: int,
        matches: npt.NDArray[np.bool_] | None = None,
        rows: Sequence[int] | None = None,
    ) -> Tile:
        """Return the marks that overlap ``t0_ns..t1_ns`` when drawn ``width`` pixels wide.

        ``rows``: the rows to include, ascending; None: all.
        """
        # 1. The slices that are visible at all.
        index = self._find_visible(t0_ns, t1_ns, rows)
        start = self.trace.start_ns[index]
        duration = self.trace.duration_ns[index]
        match = matches[index] if matches is not None else np.zeros(len(index), dtype=bool)
        # Merge slices into marks; ``first`` and ``last`` delimit the slices of each mark.
        first = self._mark_starts(index, start, duration, t0_ns, (t1_ns - t0_ns) / width)
        count = np.diff(first, append=len(index))
        last = first + count - 1
        begin = start[first]
        extent = start[last] + duration[last] - begin
        # Density: the share of a merged mark that is covered by slices, shown as its opacity.
        busy = np.add.reduceat(duration, first) if len(first) else duration
        # Each mark shows the name of one of its slices.
        shown = _choose_representatives(duration, match, first, count)
        name = self.trace.name_index[index[shown]]
        return Tile(
            t0_ns=t0_ns,
            t1_ns=t1_ns,
            columns={
                "start": begin,
                "duration": extent,
                "first": index[first],
                "index": index[shown],
                "name": name,
                "count": count,
                "row_first": np.searchsorted(self.row[index[first]], np.arange(self.num_rows + 1)),
                "colour": self.name_colour[name],
                "density": np.clip(255 * busy / np.maximum(extent, 1), 0, 255),
                "match": match[shown],
            },
        )

    def count_marks(
        self, t0_ns: float, t1_ns: float, width: int, rows: Sequence[int]
    ) -> npt.NDArray[np.int64]:
        """Return an upper estimate of the number of marks of each of ``rows`` in such a tile."""
        return np.array([min(high - low, width) for low, high in self._list_ranges(t0_ns, t1_ns, rows)], int)

    def choose_representative(self, first: int, count: int, matches: npt.NDArray[np.bool_]) -> int:
        """Return the slice that names a mark of ``count`` slices from ``first`` on."""
        run = slice(first, first + count)
        duration, match = self.trace.duration_ns[run], matches[run]
        start = np.zeros(1, np.int64)
        return first + int(_choose_representatives(duration, match, start, np.array([count]))[0])

    def sum_by_name(self, t0_ns: float, t1_ns: float, limit: int = 12) -> Table[NameTotals]:
        """Return the names with most self time between two times, over all ranks: name, slices, seconds.

        ``self_seconds`` exclude direct callees, so they add up to the busy time of all tracks over all names.
        ``total_seconds`` include callees; recursive calls are counted once. Python stacks are left out,
        because their separate tracks would count the time of operators twice.
        """
        index = self._find_visible(t0_ns, t1_ns)
        index = index[~self._is_frame[index]]
        return self._sum_by_group(index, self.trace.name_index, self.trace.names, t0_ns, t1_ns, limit)

    def sum_area(self, t0_ns: float, t1_ns: float, tracks: Sequence[int], limit: int = 12) -> AreaTotals:
        """Return the totals between two times on the tracks with these positions, by name and by category.

        Python stacks count only where no other track is given.
        """
        index = self._find_visible(t0_ns, t1_ns)
        is_wanted = np.zeros(len(self.trace.tracks) + 1, dtype=bool)
        is_wanted[list(tracks)] = True
        index = index[is_wanted[self.trace.track_index[index]]]
        operators = index[~self._is_frame[index]]
        index = operators if len(operators) else index
        trace = self.trace
        by_category = self._sum_by_group(index, trace.category_index, trace.categories, t0_ns, t1_ns, limit)
        for row in by_category:
            row["name"] = row["name"] or "no category"
        return AreaTotals(
            names=self._sum_by_group(index, trace.name_index, trace.names, t0_ns, t1_ns, limit),
            categories=by_category,
        )

    def _sum_by_group(
        self,
        index: npt.NDArray[np.int64],
        group_index: npt.NDArray[np.int32],
        groups: list[str],
        t0_ns: float,
        t1_ns: float,
        limit: int,
    ) -> Table[NameTotals]:
        """Return the totals of slices by name or category; ``group_index`` has that of each slice."""
        # Time of each slice inside the range, and the time of its direct callees.
        inside = np.minimum(self.end_ns[index], t1_ns) - np.maximum(self.trace.start_ns[index], t0_ns)
        has_caller = self.trace.parents[index] >= 0
        by_caller = np.bincount(
            self.trace.parents[index[has_caller]], weights=inside[has_caller], minlength=len(self.trace)
        )
        names = group_index[index]
        size = len(groups)
        self_seconds = np.bincount(names, weights=inside - by_caller[index], minlength=size) / 1e9
        recursive = self._is_recursive if groups is self.trace.names else self._is_inside_category
        is_outermost = ~recursive[index]
        total_seconds = np.bincount(names[is_outermost], weights=inside[is_outermost], minlength=size) / 1e9
        slices = np.bincount(names, minlength=size)
        order = np.lexsort((-total_seconds, -self_seconds))[:limit]
        return Table(
            {
                "name": groups[i],
                "slices": int(slices[i]),
                "self_seconds": float(self_seconds[i]),
                "total_seconds": float(total_seconds[i]),
            }
            for i in order.tolist()
            if slices[i]
        )

    @cached_property
    def _is_frame(self) -> npt.NDArray[np.bool_]:
        """Mask of slices that are Python frames."""
        is_python = np.array([track.kind == "python" for track in self.trace.tracks], dtype=bool)
        return is_python[self.trace.track_index] if len(self.trace) else np.zeros(0, dtype=bool)

    @cached_property
    def _is_recursive(self) -> npt.NDArray[np.bool_]:
        """Mask of slices nested in a slice of the same name, which includes their time already."""
        return mark_recursive_calls(self.trace.parents, self.trace.name_index)

    @cached_property
    def _is_inside_category(self) -> npt.NDArray[np.bool_]:
        """Mask of slices nested in a slice of the same category."""
        return mark_recursive_calls(self.trace.parents, self.trace.category_index)

    def _find_visible(
        self, t0_ns: float, t1_ns: float, rows: Sequence[int] | None = None
    ) -> npt.NDArray[np.int64]:
        """Return indices of slices that overlap the range, in store order; ``rows``: in these rows only."""
        ranges = self._list_ranges(t0_ns, t1_ns, range(self.num_rows) if rows is None else rows)
        pieces = [np.arange(low, high, dtype=np.int64) for low, high in ranges if low < high]
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)

    def _list_ranges(self, t0_ns: float, t1_ns: float, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return the first slice of each row that overlaps the range, and the end of those that do.

        Starts and ends both ascend within a row, so binary search finds them.
        """
        ranges = []
        for row in rows:
            first, last = int(self.row_bounds[row]), int(self.row_bounds[row + 1])
            low = first + int(np.searchsorted(self.end_ns[first:last], t0_ns, side="left"))
            high = first + int(np.searchsorted(self.trace.start_ns[first:last], t1_ns, side="right"))
            ranges.append((low, max(low, high)))
        return ranges

    def _mark_starts(
        self,
        index: npt.NDArray[np.int64],
        start: npt.NDArray[np.int64],
        duration: npt.NDArray[np.int64],
        t0_ns: float,
        pixel_ns: float,
    ) -> npt.NDArray[np.int64]:
        """Return where marks begin: slices of a pixel or more stay separate, smaller ones merge per pixel."""
        if not len(index):
            return index
        row = self.row[index]
        # A slice joins its predecessor if both are narrower than a pixel and start in the same one.
        small = duration < pixel_ns
        pixel = np.floor((start - t0_ns) / pixel_ns)
        joins = small[1:] & small[:-1] & (row[1:] == row[:-1]) & (pixel[1:] == pixel[:-1])
        return np.flatnonzero(np.concatenate(([True], ~joins)))


def _choose_representatives(
    duration: npt.NDArray[np.int64],
    match: npt.NDArray[np.bool_],
    first: npt.NDArray[np.int64],
    count: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Return the slice that names each mark: the longest, or the longest that matches the search."""
    if not len(first):
        return first
    # An offset above any duration puts matches first; among them the longest decides.
    weight = duration + np.where(match, np.int64(2**60), np.int64(0))
    best = np.maximum.reduceat(weight, first)
    run = np.repeat(np.arange(len(first)), count)
    candidates = np.flatnonzero(weight == best[run])[::-1]
    chosen = np.empty(len(first), dtype=np.int64)
    chosen[run[candidates]] = candidates  # reversed: the last write wins, so ties go to the earliest
    return chosen


def _choose_colours(trace: Trace) -> npt.NDArray[np.uint8]:
    """Return the color index of each name: muted for annotations, one for communication, else a hash hue."""
    wrapper_categories = [i for i, name in enumerate(trace.categories) if name in WRAPPER_CATEGORIES]
    wrappers = set(np.unique(trace.name_index[np.isin(trace.category_index, wrapper_categories)]).tolist())
    colours = np.empty(len(trace.names), dtype=np.uint8)
    for index, name in enumerate(trace.names):
        if COMMUNICATION_NAMES.search(name):
            colours[index] = COMMUNICATION
        elif index in wrappers or name.startswith("ProfilerStep"):
            colours[index] = MUTED
        else:
            colours[index] = FIRST_HUE + zlib.crc32(name.encode(errors="replace")) % NUM_HUES
    return colours
