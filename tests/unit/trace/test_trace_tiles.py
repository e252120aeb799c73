"""Tests of trace tiles: they count every visible slice at any zoom, in a bounded number of marks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from shardscope.trace import Trace
from shardscope.trace.nesting import compute_union_ns
from shardscope.trace.tiles import COMMUNICATION, MUTED, Tiler

FIXTURE = Path(__file__).parents[2] / "fixtures" / "trace_2_ranks"


@pytest.fixture(scope="module")
def tiler() -> Tiler:
    return Tiler(Trace.load(FIXTURE))


def build_tiler(tmp_path: Path, slices: list[tuple[str, float, float]]) -> Tiler:
    events = [
        {"ph": "X", "cat": "op", "name": n, "pid": 1, "tid": 1, "ts": t, "dur": d} for n, t, d in slices
    ]
    (tmp_path / "rank-0.json").write_text(json.dumps({"traceEvents": events}))
    return Tiler(Trace.load(tmp_path))


def test_full_range_tile_counts_every_slice(tiler: Tiler) -> None:
    tile = tiler.build_tile(0, tiler.trace.duration_ns_total, 1000)
    assert int(tile.columns["count"].sum()) == len(tiler.trace)
    assert tile.num_marks < len(tiler.trace)


def test_zoomed_in_tile_has_each_slice_at_its_exact_time(tiler: Tiler) -> None:
    index = len(tiler.trace) // 2
    start = int(tiler.trace.start_ns[index])
    tile = tiler.build_tile(start - 500, start + 500, 1000)
    marks = np.flatnonzero(tile.columns["index"] == index)
    assert len(marks) == 1 and int(tile.columns["count"][marks[0]]) == 1
    assert int(tile.columns["start"][marks[0]]) == start


@pytest.mark.parametrize("zoom", [1, 3, 20, 500])
def test_tile_has_all_slices_that_overlap_its_range(tiler: Tiler, zoom: int) -> None:
    total = tiler.trace.duration_ns_total
    t0, t1 = total * 0.3, total * 0.3 + total / zoom
    tile = tiler.build_tile(t0, t1, 800)
    touching = (tiler.end_ns >= t0) & (tiler.trace.start_ns <= t1)
    assert int(tile.columns["count"].sum()) == int(touching.sum())


def test_marks_of_a_row_ascend_and_do_not_overlap(tiler: Tiler) -> None:
    columns = tiler.build_tile(0, tiler.trace.duration_ns_total, 300).columns
    bounds = columns["row_first"]
    assert len(bounds) == tiler.num_rows + 1 and int(bounds[-1]) == len(columns["start"])
    for first, last in itertools.pairwise(bounds):
        start = columns["start"][first:last]
        assert np.all(start[1:] >= (start + columns["duration"][first:last])[:-1])


def test_merged_mark_is_named_after_its_longest_slice(tmp_path: Path) -> None:
    tiler = build_tiler(tmp_path, [("short", 0, 1), ("long", 2, 3), ("short", 6, 1), ("far", 900, 100)])
    columns = tiler.build_tile(0, 1_000_000, 10).columns
    assert columns["count"].tolist() == [3, 1]
    assert tiler.trace.names[columns["name"][0]] == "long"
    assert int(columns["duration"][0]) == 7000
    assert 0.6 < columns["density"][0] / 255 < 0.8


def test_merged_mark_is_named_after_a_search_match(tmp_path: Path) -> None:
    tiler = build_tiler(tmp_path, [("needle", 0, 1), ("hay", 2, 3), ("far", 900, 100)])
    columns = tiler.build_tile(0, 1_000_000, 10, tiler.find_matches("NEED")).columns
    assert columns["match"].tolist() == [True, False]
    assert tiler.trace.names[columns["name"][0]] == "needle"


def test_number_of_marks_is_bounded_by_the_width(tmp_path: Path) -> None:
    tiler = build_tiler(tmp_path, [(f"op{i % 7}", i * 2.0, 1.0) for i in range(50_000)])
    tile = tiler.build_tile(0, tiler.trace.duration_ns_total, 500)
    assert tile.num_marks <= 501
    assert int(tile.columns["count"].sum()) == 50_000


def test_nanoseconds_are_exact_far_from_the_start(tmp_path: Path) -> None:
    tiler = build_tiler(tmp_path, [("first", 0, 1), ("late", 3_600_000_000.001, 0.002)])
    column = tiler.build_tile(3.6e12 - 100, 3.6e12 + 100, 1000).columns
    assert (int(column["start"][0]), int(column["duration"][0])) == (3_600_000_000_001, 2)


def test_an_empty_trace_gives_empty_tiles(tmp_path: Path) -> None:
    tiler = build_tiler(tmp_path, [])
    tile = tiler.build_tile(0, 1000, 100, tiler.find_matches("x"))
    assert tile.num_marks == 0
    assert tiler.sum_by_name(0, 1000) == []


def test_totals_are_summed_within_the_range(tmp_path: Path) -> None:
    tiler = build_tiler(tmp_path, [("a", 0, 10), ("b", 20, 30), ("a", 60, 10)])
    assert tiler.sum_by_name(0, 70_000) == [
        {"name": "b", "slices": 1, "self_seconds": 30e-6, "total_seconds": 30e-6},
        {"name": "a", "slices": 2, "self_seconds": 20e-6, "total_seconds": 20e-6},
    ]
    part = {"name": "a", "slices": 1, "self_seconds": 5e-6, "total_seconds": 5e-6}
    assert tiler.sum_by_name(5_000, 15_000)[0] == part


def name_seconds(tiler: Tiler, t0_us: float = 0, t1_us: float = 200) -> dict[str, tuple[int, int]]:
    """Return name -> (self time, total time) in microseconds."""
    rows = tiler.sum_by_name(t0_us * 1e3, t1_us * 1e3)
    return {
        row["name"]: (round(row["self_seconds"] * 1e6), round(row["total_seconds"] * 1e6)) for row in rows
    }


def test_self_time_excludes_callees(tmp_path: Path) -> None:
    tiler = build_tiler(
        tmp_path, [("step", 0, 100), ("linear", 10, 60), ("addmm", 20, 40), ("linear", 80, 10)]
    )
    assert name_seconds(tiler) == {"addmm": (40, 40), "linear": (30, 70), "step": (30, 100)}
    assert name_seconds(tiler, 50, 100) == {"step": (20, 50), "linear": (20, 30), "addmm": (10, 10)}


def test_recursive_calls_count_once(tmp_path: Path) -> None:
    tiler = build_tiler(tmp_path, [("module", 0, 100), ("call", 5, 90), ("module", 10, 80), ("mm", 20, 50)])
    assert name_seconds(tiler) == {"mm": (50, 50), "module": (40, 100), "call": (10, 90)}


def test_slice_that_outlives_its_parent_does_not_reduce_its_self_time(tmp_path: Path) -> None:
    tiler = build_tiler(tmp_path, [("starter", 0, 10), ("sent", 5, 100), ("inside", 6, 2)])
    assert name_seconds(tiler) == {"sent": (98, 100), "starter": (10, 10), "inside": (2, 2)}


def test_self_times_add_up_to_the_busy_time(tiler: Tiler) -> None:
    """Compare with the busy time of each track of a real recording, computed without rows or names."""
    trace = tiler.trace
    busy = sum(
        compute_union_ns(trace.start_ns[mine], tiler.end_ns[mine])
        for track in range(len(trace.tracks))
        for mine in [np.flatnonzero(trace.track_index == track)]
    )
    rows = tiler.sum_by_name(0, trace.duration_ns_total, limit=10**6)
    assert sum(row["self_seconds"] for row in rows) == pytest.approx(busy / 1e9, rel=1e-9)
    assert sum(row["total_seconds"] for row in rows) > 1.5 * busy / 1e9, (
        "total times count nested slices repeatedly"
    )
    assert all(row["self_seconds"] <= row["total_seconds"] for row in rows)


def test_colour_depends_on_the_kind_of_slice(tiler: Tiler) -> None:
    colour = dict(zip(tiler.trace.names, tiler.name_colour.tolist(), strict=True))
    assert colour["gloo:all_reduce"] == COMMUNICATION
    steps = [value for name, value in colour.items() if name.startswith("ProfilerStep")]
    assert steps and set(steps) == {MUTED}
    assert colour["aten::addmm"] > COMMUNICATION


def test_an_empty_search_matches_nothing(tiler: Tiler) -> None:
    assert not tiler.find_matches("  ").any()
    assert 0 < tiler.find_matches("ADDMM").sum() < len(tiler.trace)


def test_area_adds_up_by_name_and_category_on_its_tracks(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur}
        for cat, name, tid, ts, dur in [
            ("cpu_op", "outer", 1, 0, 100),
            ("cpu_op", "inner", 1, 10, 40),
            ("user_annotation", "note", 1, 120, 20),
            ("cpu_op", "other", 2, 0, 100),
        ]
    ]
    (tmp_path / "rank-0.json").write_text(json.dumps({"traceEvents": events}))
    tiler = Tiler(Trace.load(tmp_path))
    track = next(i for i, one in enumerate(tiler.trace.tracks) if one.thread == "1")
    sums = tiler.sum_area(0, 130_000, [track])
    seconds = {
        row["name"]: (row["slices"], round(row["self_seconds"] * 1e6), round(row["total_seconds"] * 1e6))
        for row in [*sums.names, *sums.categories]
    }
    assert seconds == {
        "outer": (1, 60, 100),
        "inner": (1, 40, 40),
        "note": (1, 10, 10),
        "cpu_op": (2, 100, 100),
        "user_annotation": (1, 10, 10),
    }
    assert tiler.sum_area(0, 130_000, []).names == []
