"""Tests of tiles as bytes: at most 64 KiB each, and all marks come over as they are drawn."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.trace_analysis import NUM_EVENTS, write_repeated
from tests.requirements import thorough
from tests.unit.trace.trace_events import Events, load_ranks, operator

from shardscope.trace import Trace
from shardscope.trace.counters import MarkTiler
from shardscope.trace.path_marks import PathMarks
from shardscope.trace.tile_encoding import MAX_BYTES, EncodedTile, TileEncoder, TileRequest, decode_columns
from shardscope.trace.tiles import Tiler

FIXTURES = Path(__file__).parents[2] / "fixtures"


def create_encoder(trace: Trace) -> TileEncoder:
    return TileEncoder(Tiler(trace), MarkTiler(trace))


def read_marks(tile: EncodedTile) -> dict[int, dict[str, list[float]]]:
    """Return slices, times and names of the marks of each row, as the front end reads them."""
    columns = decode_columns(tile.columns, tile.data)
    marks: dict[int, dict[str, list[float]]] = {}
    mark = filled = 0
    for row, number in zip(tile.rows, columns["row_number"].tolist(), strict=True):
        found: dict[str, list[float]] = {"start": [], "end": [], "slice": [], "name": [], "match": []}
        at, index = (columns[name][filled] if number else 0 for name in ("row_start", "row_slice"))
        filled += number > 0
        for _ in range(number):
            at += columns["gap"][mark]
            found["start"].append(tile.t0_ns + float(at) * tile.tick_ns)
            at += columns["extent"][mark]
            found["end"].append(tile.t0_ns + float(at) * tile.tick_ns)
            found["slice"].append(int(index))
            index += columns["count"][mark]
            found["name"].append(int(columns["names"][columns["name"][mark]]))
            found["match"].append(int(columns["matches"][columns["name"][mark]]))
            mark += 1
        marks[row] = found
    return marks


def request_all(encoder: TileEncoder, t0_ns: float, t1_ns: float, width: int) -> Iterator[EncodedTile]:
    """Yield tiles until all rows and counters came, as the front end requests them."""
    rows, counters = list(range(encoder.tiler.num_rows)), list(range(len(encoder.marks.counters)))
    while rows or counters:
        request = TileRequest(t0_ns=t0_ns, t1_ns=t1_ns, width=width, rows=rows, counters=counters)
        tile = encoder.encode(request)
        assert tile.rows or tile.counters
        rows = [row for row in rows if row not in tile.rows]
        counters = [number for number in counters if number not in tile.counters]
        yield tile


@pytest.mark.parametrize("num_events", [30_000, pytest.param(NUM_EVENTS, marks=thorough())])
def test_tiles_of_a_large_trace_have_at_most_64_kib(tmp_path: Path, num_events: int) -> None:
    write_repeated(tmp_path, num_events)
    trace = Trace.load(tmp_path, cache=False)
    encoder = create_encoder(trace)
    for zoom, at, width in itertools.product([1, 40, 1000], [0.0, 0.5], [980, 16_384]):
        span = trace.duration_ns_total / zoom
        t0 = at * (trace.duration_ns_total - span)
        num_slices = 0
        for tile in request_all(encoder, t0, t0 + span, width):
            assert len(tile.data) <= MAX_BYTES
            num_slices += int(decode_columns(tile.columns, tile.data)["count"].sum())
        overlaps = (encoder.tiler.end_ns >= np.floor(t0)) & (trace.start_ns <= np.ceil(t0 + span))
        assert num_slices == int(overlaps.sum())


def test_tiles_that_do_not_compress_have_at_most_64_kib(tmp_path: Path) -> None:
    """Random times and names on every pixel of 40 rows, counters and a path that change on each."""
    random = np.random.default_rng(0)
    events: Events = []
    for depth in range(40):
        times = np.cumsum(random.integers(20, 1000, 2000)) + 1_000_000 * depth
        for at in times.tolist():
            name, length = f"op {random.integers(5000)}", int(random.integers(1, 20))
            events.append(operator(at, at + length, name) | {"tid": depth})
    for at in range(6000):
        args: dict[str, Any] = {"value": float(random.random())}
        events.append({"ph": "C", "name": "noise", "pid": 0, "tid": 0, "ts": at * 8.0, "args": args})
    trace = load_ranks(tmp_path, {0: events})
    encoder = create_encoder(trace)
    span = trace.duration_ns_total
    for width in (400, 3000, 16_384):
        tiles = list(request_all(encoder, 0, span, width))
        assert all(len(tile.data) <= MAX_BYTES for tile in tiles)
        assert sorted(row for tile in tiles for row in tile.rows) == list(range(encoder.tiler.num_rows))
    path = PathMarks.find(trace, [{"index": index} for index in range(0, len(trace), 2)])
    request = TileRequest(t0_ns=0, t1_ns=span, width=16_384, rows=[], wants_path=True)
    tile = encoder.encode(request, path)
    assert tile.has_path and len(tile.data) <= MAX_BYTES


def test_exact_marks_come_over_to_the_nanosecond(tmp_path: Path) -> None:
    slices = [("first", 0, 1), ("late", 3_600_000_000.001, 0.002), ("later", 3_600_000_000.01, 5)]
    events = [
        {"ph": "X", "cat": "op", "name": n, "pid": 1, "tid": 1, "ts": t, "dur": d} for n, t, d in slices
    ]
    (tmp_path / "rank-0.json").write_text(json.dumps({"traceEvents": events}))
    encoder = create_encoder(Trace.load(tmp_path))
    tile = encoder.encode(TileRequest(t0_ns=0.5, t1_ns=3.7e12, width=1000, rows=[0]))
    assert tile.tick_ns == 1
    marks = read_marks(tile)[0]
    assert marks["start"] == [0, 3_600_000_000_001]
    assert marks["end"] == [1000, 3_600_000_005_010]
    assert marks["slice"] == [0, 1]


@pytest.mark.parametrize("zoom", [1, 30])
def test_rounded_marks_are_less_than_a_pixel_off(zoom: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardscope.trace.tile_encoding._EXACT_BYTES", 1e9)
    trace = Trace.load(FIXTURES / "trace_2_ranks")
    encoder = create_encoder(trace)
    t0, t1, width = 0.0, trace.duration_ns_total / zoom, 700
    matches = encoder.tiler.find_matches("addmm")
    rows = list(range(encoder.tiler.num_rows))
    tile = encoder.encode(TileRequest(t0_ns=t0, t1_ns=t1, width=width, rows=rows), matches=matches)
    assert tile.tick_ns > 1
    plain = encoder.tiler.build_tile(tile.t0_ns, tile.t1_ns, width, matches).columns
    marks = read_marks(tile)
    for row in rows:
        mine = slice(*plain["row_first"][row : row + 2].tolist())
        start, end = plain["start"][mine], plain["start"][mine] + plain["duration"][mine]
        assert marks[row]["slice"] == plain["first"][mine].tolist()
        assert marks[row]["name"] == plain["name"][mine].tolist()
        assert marks[row]["match"] == plain["match"][mine].tolist()
        assert np.abs(np.array(marks[row]["start"]) - start).max(initial=0) <= tile.tick_ns
        assert np.abs(np.array(marks[row]["end"]) - end).max(initial=0) <= tile.tick_ns


def test_a_tile_has_only_the_requested_rows_and_counters() -> None:
    encoder = create_encoder(Trace.load(FIXTURES / "trace_with_stacks"))
    end = encoder.tiler.trace.duration_ns_total
    tile = encoder.encode(TileRequest(t0_ns=0, t1_ns=end, width=500, rows=[4, 2]))
    assert (tile.rows, tile.counters, tile.has_path) == ([2, 4], [], False)
    numbers = decode_columns(tile.columns, tile.data)["count"].sum()
    bounds = encoder.tiler.row_bounds
    assert numbers == sum(int(bounds[row + 1] - bounds[row]) for row in (2, 4))
