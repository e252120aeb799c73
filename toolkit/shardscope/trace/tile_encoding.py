"""Tiles as bytes for the browser: the rows that it shows, as compressed columns of at most 64 KiB.

A reply has as many of the requested rows and counters as fit; the front end requests the rest next. Where
exact times fit, marks have them. Otherwise times are rounded to an eighth of a pixel, and the front
end requests the exact times of the mark under the pointer.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from shardscope.trace.counters import MarkTiler
from shardscope.trace.path_marks import PathMarks
from shardscope.trace.tiles import Tile, Tiler

MAX_BYTES = 65_536
"""Maximum bytes of one tile."""
_ESTIMATED_BYTES = 60_000
"""Estimated bytes up to which rows are added: compression differs from one trace to the next."""
_ROUNDED_BYTES, _EXACT_BYTES, _SAMPLE_BYTES, _PATH_BYTES = 2.4, 4.0, 7.0, 4.0
"""Compressed bytes of a mark with rounded and with exact times, of a counter's sample and of a part of the
path. In tiles of twelve real traces marks have 1.7 to 3.5 and 3.1 to 7.9."""
TICKS_PER_PIXEL = 8
_LEAST_WIDTH = 16

Numbers = npt.NDArray[np.int64 | np.int32 | np.float64 | np.uint8 | np.bool_]


@dataclass(frozen=True, kw_only=True)
class TileRequest:
    """Interval, width in pixels, and the missing rows and counters, most needed first."""

    t0_ns: float
    t1_ns: float
    width: int
    rows: Sequence[int]
    counters: Sequence[int] = ()
    wants_path: bool = False


@dataclass(frozen=True, kw_only=True)
class EncodedTile:
    """One reply. ``columns`` has name, kind and number of values of each column in ``data``, in order.

    A kind is the number of bytes of an integer, stored as all lowest bytes, then all next ones; or "f4" or
    "f8", for floats. ``data`` is compressed by zlib.
    """

    t0_ns: float
    t1_ns: float
    rows: list[int]
    counters: list[int]
    has_path: bool
    tick_ns: int
    """Unit of the marks' times; 1 if they are exact."""
    columns: list[tuple[str, int | str, int]]
    data: bytes


@dataclass(frozen=True)
class TileEncoder:
    """Creator of the replies to the front end's requests for tiles."""

    tiler: Tiler
    marks: MarkTiler

    def encode(
        self,
        request: TileRequest,
        path: PathMarks | None = None,
        matches: npt.NDArray[np.bool_] | None = None,
    ) -> EncodedTile:
        """Return the first of the requested parts, at least one of them, in at most :data:`MAX_BYTES`."""
        # Whole nanoseconds, so that times which count from there are exact.
        t0_ns, t1_ns = math.floor(request.t0_ns), math.ceil(request.t1_ns)
        request = replace(request, t0_ns=t0_ns, t1_ns=t1_ns)
        rows, counters, has_path = self._choose_parts(request, path)
        width = request.width
        while True:
            part = replace(request, width=width, rows=rows, counters=counters)
            for encoded in self._encode(part, path if has_path else None, matches):
                if len(encoded.data) <= MAX_BYTES:
                    return encoded
            # Leave out a third of the parts, the least needed first; one part alone is drawn coarser.
            num_parts = len(rows) + len(counters)
            if num_parts + has_path == 1:
                width = max(width // 2, _LEAST_WIDTH)
                continue
            has_path = False
            keep = max(num_parts * 2 // 3, 1)
            rows, counters = rows[:keep], counters[: max(keep - len(rows), 0)]

    def _choose_parts(
        self, request: TileRequest, path: PathMarks | None
    ) -> tuple[list[int], list[int], bool]:
        """Return the rows and counters that should fit, and whether the path does."""
        limits = self.tiler.count_marks(request.t0_ns, request.t1_ns, request.width, request.rows)
        sizes = np.cumsum(limits * _ROUNDED_BYTES)
        num_rows = int(np.searchsorted(sizes, _ESTIMATED_BYTES, side="right"))
        if len(request.rows):
            num_rows = max(num_rows, 1)
        used = float(sizes[num_rows - 1]) if num_rows else 0.0
        rows = list(request.rows[:num_rows])
        counters: list[int] = []
        if num_rows == len(request.rows):
            for number in request.counters:
                used += _SAMPLE_BYTES * self.marks.counters[number].count_samples(
                    request.t0_ns, request.t1_ns, request.width
                )
                if used > _ESTIMATED_BYTES and (rows or counters):
                    break
                counters.append(number)
        is_last = num_rows + len(counters) == len(request.rows) + len(request.counters)
        if not request.wants_path or path is None or not is_last:
            return rows, counters, False
        used += _PATH_BYTES * path.count_parts(request.t0_ns, request.t1_ns, request.width)
        return rows, counters, used <= _ESTIMATED_BYTES or not (rows or counters)

    def _encode(
        self, request: TileRequest, path: PathMarks | None, matches: npt.NDArray[np.bool_] | None
    ) -> Iterator[EncodedTile]:
        """Yield the tile with exact times, unless it would surely be too large, and with rounded ones."""
        t0_ns, t1_ns, width = request.t0_ns, request.t1_ns, request.width
        rows = sorted(set(request.rows))
        tile = self.tiler.build_tile(t0_ns, t1_ns, width, matches, rows)
        rounded_ns = max(int((t1_ns - t0_ns) / width / TICKS_PER_PIXEL), 1)
        others = self._list_other_columns(request, path, rows, rounded_ns)
        for tick_ns in sorted({1, rounded_ns}):
            if tick_ns < rounded_ns and tile.num_marks * _EXACT_BYTES > _ESTIMATED_BYTES:
                continue
            columns = _Columns()
            self._add_marks(columns, tile, rows, tick_ns)
            columns.columns += others.columns
            columns.parts += others.parts
            yield EncodedTile(
                t0_ns=t0_ns,
                t1_ns=t1_ns,
                rows=rows,
                counters=list(request.counters),
                has_path=path is not None,
                tick_ns=tick_ns,
                columns=columns.columns,
                data=columns.compress(),
            )

    def _list_other_columns(
        self, request: TileRequest, path: PathMarks | None, rows: list[int], rounded_ns: int
    ) -> _Columns:
        """Return the columns of instants, counters and the path."""
        columns = _Columns()
        t0_ns, t1_ns, width = request.t0_ns, request.t1_ns, request.width
        instants = self.marks.cut_instants(t0_ns, t1_ns, width, rows)
        instant_row, instant_count = np.unique(instants["row"], return_counts=True)
        columns.add("instant_row", instant_row)
        columns.add("instant_number", instant_count)
        columns.add("instant_time", instants["time"] - int(t0_ns))
        columns.add("instant_name", instants["name"])
        columns.add("instant_count", instants["count"])
        samples = self.marks.cut_counters(t0_ns, t1_ns, width, request.counters)
        columns.add("counter_number", np.diff(samples["first"]))
        begin = samples["time"].min(initial=t0_ns)
        columns.add_float("counter_begin", np.array([begin]), "f8")
        columns.add("counter_time", samples["time"] - begin)
        columns.add_float("counter_value", samples["value"], "f4")
        if path is not None:
            _add_path(columns, path, request, rounded_ns)
        return columns

    def _add_marks(self, columns: _Columns, tile: Tile, rows: list[int], tick_ns: int) -> None:
        """Add the marks of ``rows``: each row's first time and slice, and from there only differences."""
        start, duration = tile.columns["start"], tile.columns["duration"]
        bounds = tile.columns["row_first"]
        first = bounds[rows].astype(np.int64)
        number = bounds[[row + 1 for row in rows]].astype(np.int64) - first
        begin = np.rint((start - tile.t0_ns) / tick_ns).astype(np.int64)
        end = np.maximum(np.rint((start + duration - tile.t0_ns) / tick_ns).astype(np.int64), begin)
        # The distance from the end of the mark before; a row's first mark is at its own time.
        gap = np.zeros(len(begin), np.int64)
        gap[1:] = np.maximum(begin[1:] - end[:-1], 0)
        has_marks = first[number > 0]
        gap[has_marks] = 0
        names, name = np.unique(tile.columns["name"], return_inverse=True)
        columns.add("row_number", number)
        columns.add_float("row_start", begin[has_marks], "f8")
        columns.add("row_slice", tile.columns["first"][has_marks])
        columns.add("gap", gap)
        columns.add("extent", end - begin)
        columns.add("name", name)
        columns.add("count", tile.columns["count"])
        columns.add("density", np.where(tile.columns["count"] > 1, tile.columns["density"], 0))
        columns.add("names", names)
        columns.add("colours", self.tiler.name_colour[names])
        # Names match, not slices, so one flag for each name is enough.
        is_match = np.zeros(len(names), np.uint8)
        is_match[name[tile.columns["match"].astype(bool)]] = 1
        columns.add("matches", is_match)


def _add_path(columns: _Columns, path: PathMarks, request: TileRequest, tick_ns: int) -> None:
    """Add the parts of the path, with rounded times: only the drawing uses them."""
    cut = path.cut(request.t0_ns, request.t1_ns, request.width)
    margin = request.t1_ns - request.t0_ns
    low, high = request.t0_ns - margin, request.t1_ns + margin
    start = np.rint((np.clip(cut["start"], low, high) - low) / tick_ns).astype(np.int64)
    end = np.rint((np.clip(cut["end"], low, high) - low) / tick_ns).astype(np.int64)
    columns.add("path_gap", np.diff(start, prepend=0))
    columns.add("path_extent", end - start)
    columns.add("path_row", cut["row"])
    columns.add("path_is_slice", cut["is_slice"])


@dataclass
class _Columns:
    """Columns of one tile."""

    columns: list[tuple[str, int | str, int]] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)

    def add(self, name: str, values: Numbers) -> None:
        """Add integers from 0 up: all lowest bytes first, then the next ones, since high bytes are alike."""
        wide = np.ascontiguousarray(values, dtype="<u8")
        num_bytes = (int(wide.max()).bit_length() + 7) // 8 if len(wide) else 0
        planes = wide.view(np.uint8).reshape(len(wide), 8).T[: max(num_bytes, 1)]
        self.columns.append((name, max(num_bytes, 1), len(wide)))
        self.parts.append(planes.tobytes())

    def add_float(self, name: str, values: Numbers, kind: str) -> None:
        """Add numbers as floats."""
        self.columns.append((name, kind, len(values)))
        self.parts.append(np.asarray(values).astype(f"<{kind}").tobytes())

    def compress(self) -> bytes:
        """Return the bytes of all columns."""
        return zlib.compress(b"".join(self.parts), 6)


def decode_columns(columns: Iterable[tuple[str, int | str, int]], data: bytes) -> Mapping[str, Numbers]:
    """Return the columns of :class:`EncodedTile` by name, as the front end reads them."""
    raw = zlib.decompress(data)
    decoded: dict[str, Numbers] = {}
    at = 0
    for name, kind, count in columns:
        if isinstance(kind, str):
            decoded[name] = np.frombuffer(raw, f"<{kind}", count, at).astype(np.float64)
            at += count * int(kind[1])
            continue
        planes = np.frombuffer(raw, np.uint8, kind * count, at).reshape(kind, count).astype(np.int64)
        decoded[name] = (planes << (8 * np.arange(kind))[:, None]).sum(axis=0)
        at += kind * count
    return decoded
