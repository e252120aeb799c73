"""Tests of memory over time and of the time by module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_events import kernel, launch, load_ranks, make_slice, operator, to_ns

from shardscope.trace import Trace
from shardscope.trace.analysis.memory import MAX_POINTS, choose_points


def record(time: int, change: int, device: int = -1, **more: Any) -> dict[str, Any]:
    args = {"Device Type": 0 if device < 0 else 1, "Device Id": device, "Bytes": change, **more}
    return {"ph": "i", "s": "t", "name": "[memory]", "pid": 100, "tid": 100, "ts": time / 1000, "args": args}


def test_memory_over_time_has_the_recorded_totals(tmp_path: Path) -> None:
    totals = [{"Total Allocated": total, "Total Reserved": 4096} for total in (512, 1536, 1024)]
    events = [
        operator(1000, 2000),
        record(1200, 512, 1, **totals[0]),
        record(1600, 1024, 1, **totals[1]),
        record(1800, -512, 1, **totals[2]),
    ]
    table = load_ranks(tmp_path, {0: events}).memory()
    assert [(to_ns(row["seconds"]), row["allocated_bytes"]) for row in table] == [
        (200, 512),
        (600, 1536),
        (800, 1024),
    ]
    assert {(row["rank"], row["device"], row["reserved_bytes"]) for row in table} == {(0, "cuda:1", 4096)}
    assert list(table.to_frame().columns) == [
        "rank",
        "device",
        "seconds",
        "allocated_bytes",
        "reserved_bytes",
    ]


def test_memory_without_totals_is_added_up_and_never_negative(tmp_path: Path) -> None:
    """300 bytes were allocated before the recording and are freed in it."""
    events = [operator(0, 100), record(10, 100), record(20, -400), record(30, 50)]
    table = load_ranks(tmp_path, {0: events}).memory()
    assert [row["allocated_bytes"] for row in table] == [400, 0, 50]
    assert {(row["device"], row["reserved_bytes"]) for row in table} == {("cpu", None)}


def test_reserved_memory_is_unknown_without_totals(tmp_path: Path) -> None:
    """The records of old recordings have the change alone: 0 bytes reserved would be less than allocated."""
    events = [operator(0, 100), record(10, 512, 0), record(20, -512, 0)]
    table = load_ranks(tmp_path, {0: events}).memory()
    assert [(row["allocated_bytes"], row["reserved_bytes"]) for row in table] == [(512, None), (0, None)]


def test_malformed_memory_records_are_left_out(tmp_path: Path) -> None:
    broken = record(10, 5) | {"args": {"Bytes": "many"}}
    unknown = {key: value for key, value in record(20, 5).items() if key != "ts"}
    trace = load_ranks(tmp_path, {0: [operator(0, 100), broken, unknown, record(30, 5)]})
    assert [row["allocated_bytes"] for row in trace.memory()] == [5]


def test_devices_of_other_vendors_have_the_names_of_torch(tmp_path: Path) -> None:
    events = [operator(0, 100)]
    for number, (kind, total) in enumerate([(6, 10), (12, 20), (20, 30)]):
        event = record(10 + number, total, 0, **{"Total Allocated": total, "Total Reserved": 64})
        events.append(event | {"args": {**event["args"], "Device Type": kind}})
    devices = {row["device"]: row["allocated_bytes"] for row in load_ranks(tmp_path, {0: events}).memory()}
    assert devices == {"hip:0": 10, "xpu:0": 20, "privateuseone:0": 30}


def test_of_many_memory_records_the_peaks_stay() -> None:
    times = np.arange(10 * MAX_POINTS)
    values = np.random.default_rng(0).integers(0, 1000, len(times)).astype(float)
    values[12_345] = 5000
    chosen = choose_points(times, values)
    assert len(chosen) <= MAX_POINTS and 12_345 in chosen and np.all(np.diff(chosen) > 0)


def module(start: int, end: int, name: str, tid: int = 100) -> dict[str, Any]:
    return make_slice(f"nn.Module: {name}", start, end, cat="python_function", pid=100, tid=tid)


NODE = "autograd::engine::evaluate_function: MmBackward0"


def test_kernels_belong_to_the_innermost_module_and_backward_to_its_operators(tmp_path: Path) -> None:
    events = [
        module(0, 100, "Sequential_0"),
        module(10, 40, "Linear_0"),
        operator(12, 30, "aten::mm", **{"Sequence number": 7, "Fwd thread id": 0}),
        launch(15, 18, 1),
        kernel(200, 250, correlation=1),
        module(50, 80, "Linear_1"),
        operator(52, 70, "aten::mm", **{"Sequence number": 8, "Fwd thread id": 0}),
        launch(55, 58, 2),
        kernel(250, 320, correlation=2),
        operator(90, 98, "aten::add"),
        launch(92, 95, 3),
        kernel(320, 330, "elementwise", correlation=3),
        # Another thread goes back, with no module around it.
        operator(400, 450, NODE, 101, **{"Sequence number": 7, "Fwd thread id": 1}),
        operator(405, 440, "aten::mm", 101),
        launch(410, 415, 4, 101),
        kernel(500, 600, correlation=4),
        operator(600, 700, "aten::zero_"),
        launch(650, 655, 5),
        kernel(700, 705, correlation=5),
    ]
    rows = {row["module"]: row for row in load_ranks(tmp_path, {0: events}).modules()}
    times = {
        name: (to_ns(row["forward_seconds"]), to_ns(row["backward_seconds"]), to_ns(row["host_seconds"]))
        for name, row in rows.items()
    }
    assert times == {"Linear_0": (50, 100, 30), "Linear_1": (70, 0, 30), "Sequential_0": (10, 0, 100)}


def test_modules_of_cpu_ranks_have_their_operators(tmp_path: Path) -> None:
    events = [
        module(0, 100, "Linear_0"),
        operator(10, 90, "aten::linear"),
        operator(20, 80, "aten::addmm"),
        operator(200, 300, "aten::mul"),
    ]
    (row,) = load_ranks(tmp_path, {0: events}).modules()
    assert (row["module"], row["num_calls"], to_ns(row["forward_seconds"])) == ("Linear_0", 1, 80)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("memory", "profile_memory=True"), ("modules", "with_stack=True"), ("launches", "no GPU work")],
)
def test_without_such_records_the_tables_are_empty_and_say_why(
    tmp_path: Path, name: str, reason: str
) -> None:
    table = getattr(load_ranks(tmp_path, {0: [operator(0, 10), kernel(0, 5)]}), name)()
    assert len(table) == 0 and "rank" in table.to_frame().columns
    assert repr(table).startswith("no rows: the trace has ") and reason in repr(table)
    assert repr(table) in table._repr_html_()


def test_recorded_stacks_have_modules() -> None:
    rows = Trace.load(Path(__file__).parents[2] / "fixtures" / "trace_with_stacks").modules()
    counts = {row["module"]: row["num_calls"] for row in rows}
    assert counts["TransformerEncoderLayer_0"] == counts["TransformerEncoderLayer_1"] == 1
