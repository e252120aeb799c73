"""Tests of flows, counters, instants and slices from begin and end events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.trace.trace_events import kernel, launch, load_ranks, operator

from shardscope.trace import Trace
from shardscope.trace.loading.chunks import COUNTER, FLOW_END, FLOW_START, INSTANT

Events = list[dict[str, Any]]


def mark(phase: str, time_ns: int, name: str = "mark", tid: int = 100, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "cat": "c", "name": name, "pid": 100, "tid": tid, "ts": time_ns / 1000, **more}


def load(tmp_path: Path, events: Events) -> Trace:
    return load_ranks(tmp_path, {0: events})


def get_times(trace: Trace, phase: int) -> list[int]:
    return trace.marks.time_ns[trace.marks.select(phase)].tolist()


def test_flows_link_launches_and_kernels(tmp_path: Path) -> None:
    events = [
        operator(0, 100),
        launch(10, 20, 7),
        launch(30, 40, 8),
        kernel(50, 60, "first", correlation=7),
        kernel(60, 90, "second", correlation=8),
        mark("s", 10, id=7, cat="ac2g"),
        mark("f", 50, id=7, cat="ac2g", tid=7) | {"pid": 0},
        mark("f", 60, id=8, cat="ac2g", tid=7) | {"pid": 0},
        mark("s", 30, id=8, cat="ac2g"),
        mark("s", 30, id=7, cat="fwdbwd"),  # without an end; of another category, so no arrow to it
    ]
    trace = load(tmp_path, events)
    arrows = [
        (trace.slice(source)["start_seconds"], trace.slice(target)["name"])
        for source, target in zip(*trace.flows, strict=True)
    ]
    assert arrows == [(10e-9, "first"), (30e-9, "second")]
    assert get_times(trace, FLOW_START) == [10, 30, 30] and get_times(trace, FLOW_END) == [50, 60]
    assert trace.notes == []


def test_ids_of_flows_may_be_texts(tmp_path: Path) -> None:
    events = [operator(0, 10), operator(20, 30, "aten::add")]
    events += [mark("s", 5, id="0x1f"), mark("f", 25, id="0x1f"), mark("f", 26, id="0x20")]
    trace = load(tmp_path, events)
    assert [array.tolist() for array in trace.flows] == [[0], [1]]


def test_counters_and_instants_keep_their_values(tmp_path: Path) -> None:
    events = [
        operator(0, 10),
        mark("C", 4, "memory", args={"bytes": 5}),
        mark("C", 2, "memory", args={"bytes": 3}),
    ]
    events += [mark("i", 3, "Iteration Start", args={"n": 1})]
    trace = load(tmp_path, events)
    counters = trace.marks.select(COUNTER)
    assert [trace.marks.arguments[index] for index in counters.tolist()] == [b'{"bytes": 3}', b'{"bytes": 5}']
    (instant,) = trace.marks.select(INSTANT).tolist()
    assert trace.names[trace.marks.name_index[instant]] == "Iteration Start"
    assert trace.marks.keys[trace.marks.key_index[instant]] == (100, 100)
    assert trace.tracks[trace.marks.track_index[instant]].kind == "cpu"


def test_begin_and_end_events_are_slices(tmp_path: Path) -> None:
    events = [mark("B", 10, "outer", args={"x": 1}), mark("B", 20, "inner"), mark("E", 30), mark("E", 50)]
    events += [mark("E", 60), mark("B", 70, "open"), operator(0, 100, "aten::mm", 101)]
    trace = load(tmp_path, events)
    slices = {trace.slice(index)["name"]: index for index in range(len(trace))}
    spans = {name: (int(trace.start_ns[i]), int(trace.duration_ns[i])) for name, i in slices.items()}
    assert spans == {"outer": (10, 40), "inner": (20, 10), "open": (70, 30), "aten::mm": (0, 100)}
    assert trace.depth[slices["inner"]] == 1
    assert trace.args(slices["outer"]) == {"x": 1}
    assert trace.notes == [
        "1 begin event without an end drawn to the last event",
        "1 end event without a begin left out",
    ]


def test_asynchronous_pairs_have_tracks_of_their_own(tmp_path: Path) -> None:
    """They overlap what runs on threads, and count neither as compute nor as busy time."""
    work = [operator(0, 100)]
    pairs = [mark("b", 10, "request", id=1), mark("b", 20, "request", id=2)]
    pairs += [mark("e", 60, "request", id=1), mark("e", 90, "request", id=2)]
    trace = load(tmp_path / "pairs", work + pairs)
    assert [(track.name, track.kind, track.num_rows) for track in trace.tracks] == [
        ("CPU thread 100", "cpu", 1),
        ("async c", "async", 2),
    ]
    on_async = trace.track_index == 1
    assert trace.duration_ns[on_async].tolist() == [50, 70]
    assert trace.breakdown() == load(tmp_path / "alone", work).breakdown()


def test_correlation_ids_are_a_column(tmp_path: Path) -> None:
    trace = load(
        tmp_path, [operator(0, 9, correlation=3), launch(1, 2, 2**40), kernel(5, 8, correlation=2**40)]
    )
    by_name = dict(zip((trace.names[i] for i in trace.name_index), trace.correlation.tolist(), strict=True))
    assert by_name == {"aten::mm": -1, "cudaLaunchKernel": 2**40, "gemm": 2**40}
