"""The critical path as marks for display: which row each of its parts is on, merged per pixel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardscope.trace.store import Trace
from shardscope.trace.tiles import Column

PATH_COLUMNS = (("start", "<f8"), ("end", "<f8"), ("row", "<u4"), ("is_slice", "u1"))
"""Name and type of each buffer of a path, in order; times in nanoseconds from the trace's first slice."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PathMarks:
    """Parts of a path in order of time; one entry per part."""

    start_ns: Int64s
    end_ns: Int64s
    row: Int64s
    """Row of the part's slice, or the first row of its track where no slice was recorded."""
    is_slice: npt.NDArray[np.bool_]
    """Whether the part is a slice; otherwise a wait or time without an operator."""

    @classmethod
    def find(cls, trace: Trace, parts: Iterable[Mapping[str, object]]) -> PathMarks:
        """Return the marks of the rows of ``trace.critical_path()``; of rows with ``index``, those slices.

        Raises ``ValueError`` for a row without these fields or with ones that are not in the trace.
        """
        finder = _RowFinder(trace)
        entries = sorted(finder.find(part) for part in parts)
        start, end, row, is_slice = np.array(entries, np.int64).reshape(len(entries), 4).T
        return cls(start_ns=start, end_ns=end, row=row, is_slice=is_slice.astype(bool))

    def count_parts(self, t0_ns: float, t1_ns: float, width: int) -> int:
        """Return an upper estimate of the number of parts that :meth:`cut` returns."""
        seen = int(np.count_nonzero((self.end_ns >= t0_ns) & (self.start_ns <= t1_ns)))
        return min(seen, 4 * width)

    def cut(self, t0_ns: float, t1_ns: float, width: int) -> dict[str, Column]:
        """Return the columns of :data:`PATH_COLUMNS` between two times, as drawn ``width`` pixels wide.

        Parts narrower than a pixel merge with others of their row that start in the same one.
        """
        pixel_ns = (t1_ns - t0_ns) / width
        seen = np.flatnonzero((self.end_ns >= t0_ns) & (self.start_ns <= t1_ns))
        start, end, row = self.start_ns[seen].astype(np.float64), self.end_ns[seen], self.row[seen]
        pixel = np.floor((start - t0_ns) / pixel_ns).astype(np.int64)
        # Each wide part has a key of its own; narrow ones have that of their row and pixel.
        key = np.where(end - start < pixel_ns, row * (width + 2) + pixel, -1 - np.arange(len(seen)))
        _, first = np.unique(key, return_index=True)
        first.sort()
        return {
            "start": start[first],
            "end": np.maximum(end[first].astype(np.float64), start[first]),
            "row": row[first],
            "is_slice": self.is_slice[seen][first],
        }


class _RowFinder:
    """The row of each part of a path."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.tracks = {(track.rank, track.name): i for i, track in reversed(list(enumerate(trace.tracks)))}
        self.names = {name: i for i, name in enumerate(trace.names)}
        rows = trace.first_row_of_track[:-1][trace.track_index] + trace.depth if len(trace) else np.zeros(0)
        self.rows = rows.astype(np.int64)
        self.bounds = np.searchsorted(self.rows, np.arange(int(trace.first_row_of_track[-1]) + 1))

    def find(self, part: Mapping[str, object]) -> tuple[int, int, int, bool]:
        """Return start, end, row, and whether that is of a slice. Raises ``ValueError``."""
        trace, index = self.trace, part.get("index")
        if isinstance(index, int | np.integer) and 0 <= index < len(trace):
            start = int(trace.start_ns[index])
            return start, start + int(trace.duration_ns[index]), int(self.rows[index]), True
        rank, track_name, seconds = part.get("rank"), part.get("track"), part.get("seconds")
        begin = part.get("start_seconds")
        track = self.tracks.get((rank, track_name)) if isinstance(rank, int) else None  # type: ignore[arg-type]
        if not isinstance(begin, int | float) or not isinstance(seconds, int | float):
            raise ValueError(
                f"A part of the path has start_seconds {begin!r} and seconds {seconds!r}; "
                "allowed: two numbers. Fix: pass trace.critical_path()."
            )
        start, end = round(begin * 1e9), round((begin + seconds) * 1e9)
        if track is None:
            # The time of a rank outside of its operators has no track: it is on the rank's first one.
            track = next((i for i, one in enumerate(trace.tracks) if one.rank == rank), None)
        if track is None:
            raise ValueError(
                f"A part of the path is on rank {rank!r}, which is not in the trace. Allowed: {trace.ranks}. "
                "Fix: pass the critical_path() of this trace."
            )
        first_row, last_row = trace.first_row_of_track[track : track + 2].tolist()
        name_index = self.names.get(str(part.get("name")), -1)
        for row in range(first_row, last_row):
            first, last = self.bounds[row : row + 2].tolist()
            position = first + int(np.searchsorted(trace.start_ns[first:last], start, side="right")) - 1
            if position < first or trace.name_index[position] != name_index:
                continue
            if int(trace.start_ns[position]) + int(trace.duration_ns[position]) > start:
                return start, end, row, True
        return start, end, first_row, False
