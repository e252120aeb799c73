"""Tests of breakdown, steps, overlap and idle against a reference that counts every nanosecond."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_events import (
    Events,
    all_reduce,
    annotation,
    cpu_events,
    gpu_events,
    kernel,
    launch,
    load_ranks,
    make_slice,
    nanoseconds,
    operator,
    step,
    to_ns,
)

from shardscope.trace import Trace
from shardscope.trace.analysis.breakdown import mark_outliers
from shardscope.trace.analysis.intervals import (
    Intervals,
    find_exclusive_parts,
    intersect,
    measure_within,
    merge_intervals,
    subtract,
    unite,
)

BREAKDOWN_COLUMNS = [
    "rank",
    "compute_seconds",
    "communication_seconds",
    "overlapped_seconds",
    "exposed_communication_seconds",
    "copy_seconds",
    "idle_seconds",
    "span_seconds",
]


def is_communication(event: dict[str, Any]) -> bool:
    return "nccl" in event["name"] if event["cat"] == "kernel" else event["name"].startswith("gloo:")


def check_parts(
    row: Any, compute: set[int], communication: set[int], copies: set[int], span: set[int]
) -> None:
    """Compare one row with sets of nanoseconds; equality is exact."""
    compute, communication, copies = compute & span, communication & span, copies & span
    assert to_ns(row["compute_seconds"]) == len(compute)
    assert to_ns(row["communication_seconds"]) == len(communication)
    assert to_ns(row["overlapped_seconds"]) == len(communication & compute)
    assert to_ns(row["exposed_communication_seconds"]) == len(communication - compute)
    assert to_ns(row["copy_seconds"]) == len(copies - compute - communication)
    assert to_ns(row["idle_seconds"]) == len(span - compute - communication - copies)
    assert to_ns(row["span_seconds"]) == len(span)


def split_gpu_work(events: Events) -> tuple[set[int], set[int], set[int]]:
    kernels = [event for event in events if event["cat"] == "kernel"]
    return (
        nanoseconds(event for event in kernels if not is_communication(event)),
        nanoseconds(event for event in kernels if is_communication(event)),
        nanoseconds(event for event in events if event["cat"] == "gpu_memcpy"),
    )


def list_step_windows(events: Events) -> list[tuple[int, int]]:
    marks = [event for event in events if event["name"].startswith("ProfilerStep")]
    starts = [round(event["ts"] * 1000) for event in marks]
    if not marks:
        return []
    end = round((marks[-1]["ts"] + marks[-1]["dur"]) * 1000)
    return list(zip(starts, [*starts[1:], end], strict=True))


@given(gpu_events())
def test_breakdown_of_gpu_ranks_is_the_reference_to_the_nanosecond(events: Events) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = load_ranks(Path(folder), {0: events})
    (row,) = trace.breakdown()
    span = set(range(max(round((event["ts"] + event["dur"]) * 1000) for event in events)))
    check_parts(row, *split_gpu_work(events), span)
    assert all(value >= 0 for value in row.values())
    idle = trace.idle()
    assert sum(to_ns(cause["seconds"]) for cause in idle) == to_ns(row["idle_seconds"])
    assert all(cause["seconds"] >= 0 for cause in idle)
    # Steps: all but the last end where the next begins; the last may be longer, by the GPU work launched in
    # it.
    for measured, (start, end) in zip(trace.steps()[:-1], list_step_windows(events)[:-1], strict=True):
        check_parts(measured, *split_gpu_work(events), set(range(start, end)))


@given(cpu_events())
def test_breakdown_of_cpu_ranks_is_the_reference_to_the_nanosecond(events: Events) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = load_ranks(Path(folder), {0: events})
    compute = nanoseconds(event for event in events if event["cat"] == "cpu_op")
    communication = nanoseconds(event for event in events if is_communication(event))
    first = min(round(event["ts"] * 1000) for event in events)
    span = set(range(first, max(round((event["ts"] + event["dur"]) * 1000) for event in events)))
    (row,) = trace.breakdown()
    check_parts(row, compute, communication, set(), span)
    for measured, (start, end) in zip(trace.steps(), list_step_windows(events), strict=True):
        check_parts(measured, compute, communication, set(), set(range(start, end)))


@given(st.lists(st.one_of(gpu_events(), cpu_events()), min_size=2, max_size=3))
def test_merging_ranks_does_not_change_the_parts_of_a_rank(ranks: list[Events]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        merged = load_ranks(Path(folder) / "all", dict(enumerate(ranks)))
        alone = [load_ranks(Path(folder) / str(rank), {rank: events}) for rank, events in enumerate(ranks)]
    for rank, trace in enumerate(alone):
        for name in ("breakdown", "steps", "overlap", "idle"):
            rows = [row for row in getattr(merged, name)() if row["rank"] == rank]
            keys = getattr(trace, name)().columns
            of_merged = [{key: row[key] for key in keys} for row in rows]
            assert of_merged == [{key: row[key] for key in keys} for row in getattr(trace, name)()]


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=8)


@given(intervals, intervals)
def test_interval_sets_are_sets_of_nanoseconds(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    def build(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, set[int]]:
        start = np.array([start for start, _ in pairs], np.int64)
        length = np.array([length for _, length in pairs], np.int64)
        return start, start + length, {n for a, b in pairs for n in range(a, a + b)}

    a_start, a_end, a_set = build(first)
    b_start, b_end, b_set = build(second)
    a, b = merge_intervals(a_start, a_end), merge_intervals(b_start, b_end)

    def list_nanoseconds(merged: Intervals) -> set[int]:
        assert np.all(merged.start < merged.end) and np.all(merged.end[:-1] < merged.start[1:])
        return {
            n for s, e in zip(merged.start.tolist(), merged.end.tolist(), strict=True) for n in range(s, e)
        }

    assert list_nanoseconds(a) == a_set
    assert list_nanoseconds(unite(a, b)) == a_set | b_set
    assert list_nanoseconds(intersect(a, b)) == a_set & b_set
    assert list_nanoseconds(subtract(a, b)) == a_set - b_set
    assert measure_within(a, b_start, b_end).tolist() == [
        len(a_set & set(range(s, e))) for s, e in zip(b_start.tolist(), b_end.tolist(), strict=True)
    ]
    start, end = find_exclusive_parts(a_start, a_end)
    assert int((end - start).sum()) == len(a_set) and np.all(end >= start)


def test_data_frames_have_the_designed_columns(tmp_path: Path) -> None:
    trace = load_ranks(tmp_path, {0: [step(3, 0, 100), kernel(10, 20), all_reduce(15, 40)]})
    assert list(trace.breakdown().to_frame().columns) == BREAKDOWN_COLUMNS
    assert list(trace.steps().to_frame().columns) == ["rank", "step", *BREAKDOWN_COLUMNS[1:], "is_outlier"]
    assert list(trace.overlap().to_frame().columns) == [
        "rank",
        "overlapped_seconds",
        "communication_seconds",
        "share",
    ]
    assert list(trace.idle().to_frame().columns) == ["rank", "cause", "seconds", "share"]


def test_communication_is_known_by_arguments_launch_and_name_on_gpu_tracks_only(tmp_path: Path) -> None:
    """Python frames of distributed_c10d and CPU operators are not communication of a rank with a GPU."""
    frame = "torch/distributed/distributed_c10d.py(2806): all_reduce"
    events = [
        make_slice(frame, 0, 1000, cat="python_function", pid=100, tid=100),
        annotation(0, 900, "nccl:all_reduce"),
        operator(0, 900, "c10d::allreduce_"),
        operator(100, 200, "record_param_comms"),
        launch(110, 120, 1),
        kernel(200, 210, "some_vendor_kernel", correlation=1),
        kernel(300, 320, "another_vendor_kernel", **{"Collective name": "allreduce", "Group size": 2}),
        kernel(400, 440, "multimem_all_reduce_kernel"),
        kernel(500, 600, "ampere_bf16_s16816gemm"),
    ]
    (row,) = load_ranks(tmp_path, {0: events}).breakdown()
    assert to_ns(row["communication_seconds"]) == 10 + 20 + 40
    assert to_ns(row["compute_seconds"]) == 100


def test_a_thread_that_waits_inside_an_operator_does_not_compute(tmp_path: Path) -> None:
    """Containers (autograd nodes, Python functions) may wait inside; only operators inside compute."""
    events = [
        operator(0, 100, "autograd::engine::evaluate_function: MyLinearBackward"),
        operator(0, 100, "MyLinearBackward"),
        operator(10, 30, "aten::mm"),
        annotation(40, 90, "gloo:all_gather", tid=200),
        operator(50, 60, "aten::copy_", tid=200),
        operator(95, 99, "my_own_function"),
    ]
    (row,) = load_ranks(tmp_path, {0: events}).breakdown()
    assert to_ns(row["compute_seconds"]) == 20 + 4
    assert to_ns(row["exposed_communication_seconds"]) == 50
    assert to_ns(row["idle_seconds"]) == 26


def test_an_operator_that_is_dispatched_in_python_does_not_hide_communication(tmp_path: Path) -> None:
    """DTensor runs the operator on each rank's shard inside of it, and waits for its collectives there."""
    events = [
        operator(0, 100, "aten::mm"),
        operator(5, 95, "PythonSubclass"),
        operator(10, 60, "Redistribute"),
        operator(20, 55, "_c10d_functional::wait_tensor"),
        annotation(20, 50, "gloo:all_gather", tid=200),
        operator(65, 90, "aten::mm"),
    ]
    trace = load_ranks(tmp_path, {0: events})
    (row,) = trace.breakdown()
    assert to_ns(row["compute_seconds"]) == 25
    assert to_ns(row["exposed_communication_seconds"]) == 30 and row["overlapped_seconds"] == 0
    (path,) = (path for path in trace.critical_path() if path["name"] == "aten::mm")
    assert (path["kind"], to_ns(path["seconds"])) == ("compute", 25)


@pytest.mark.parametrize("waits", [False, True])
def test_kernels_of_a_compiled_graph_on_the_cpu_are_compute(tmp_path: Path, waits: bool) -> None:
    """No event has torch.compile's C++ kernels: the time between operators of its graph was Python's."""
    name = "## Call CompiledFxGraph fqml4hzr4itcnkj3whyvpa2sx3nwcrthxqrwn4meorweauiktl4n ##"
    events = [
        operator(0, 100, "Torch-Compiled Region: 0/0"),
        operator(5, 95, "CompiledFunction"),
        annotation(10, 90, name),
        operator(20, 50, "aten::addmm"),
    ]
    if waits:  # a collective inside of the graph is exposed all the same
        events += [
            operator(60, 85, "_c10d_functional::wait_tensor"),
            annotation(60, 80, "gloo:all_gather", tid=200),
        ]
    trace = load_ranks(tmp_path, {0: events})
    (row,) = trace.breakdown()
    assert to_ns(row["compute_seconds"]) == (30 if waits else 80)
    assert to_ns(row["exposed_communication_seconds"]) == (20 if waits else 0)
    if not waits:
        seconds = {one["kind"]: to_ns(one["total_seconds"]) for one in trace.kernels().sum_by_kind()}
        assert seconds == {"matmul": 30, "elementwise": 50}
        shares = {one["kind"]: to_ns(one["seconds"]) for one in trace.critical_path().sum_by_kind()}
        assert shares == {"compute": 80, "host": 20}
        assert name in {one["name"] for one in trace.summary().operators}


def test_a_message_of_gloo_does_not_hide_the_compute_of_its_thread(tmp_path: Path) -> None:
    """A receive begins on the thread that calls it, which computes until it waits: all was waiting."""
    events = [
        operator(0, 5, "c10d::recv_"),
        annotation(2, 100, "gloo:recv"),
        operator(10, 80, "aten::mm"),
        operator(20, 30, "aten::copy_"),
    ]
    (row,) = load_ranks(tmp_path, {0: events}).breakdown()
    assert to_ns(row["compute_seconds"]) == to_ns(row["overlapped_seconds"]) == 70
    assert to_ns(row["exposed_communication_seconds"]) == 28


def test_operators_on_a_thread_of_gloo_are_part_of_its_collective(tmp_path: Path) -> None:
    events = [
        operator(0, 5, "c10d::allreduce_"),
        annotation(2, 100, "gloo:all_reduce", tid=200),
        operator(10, 80, "aten::add_", tid=200),
    ]
    (row,) = load_ranks(tmp_path, {0: events}).breakdown()
    assert row["compute_seconds"] == 0 and to_ns(row["exposed_communication_seconds"]) == 98


def test_idle_causes_of_a_gpu(tmp_path: Path) -> None:
    """A gap is host-bound only if the next kernel was launched after the gap had begun."""
    events = [
        step(0, 0, 1000),
        launch(0, 10, 1),
        kernel(20, 100, correlation=1),
        launch(150, 160, 2),  # the GPU ran dry at 100: host-bound until 200
        kernel(200, 300, correlation=2),
        launch(250, 260, 3),  # queued while the last ran: the gap of 20 has another cause
        kernel(320, 400, correlation=3),
        annotation(400, 460, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
        launch(480, 490, 4),
        kernel(500, 600, correlation=4),
        annotation(610, 690, "gloo:barrier", tid=200),
        launch(690, 695, 5),
        kernel(700, 1000, correlation=5),
    ]
    trace = load_ranks(tmp_path, {0: events})
    rows = {row["cause"]: row for row in trace.idle()}
    assert {cause: to_ns(row["seconds"]) for cause, row in rows.items()} == {
        "host-bound": 20 + 100 + 40 + 20,
        "waiting for a collective": 80,
        "data loading": 60,
        "other": 20,
    }
    longest = rows["host-bound"]
    assert (to_ns(longest["start_seconds"]), to_ns(longest["end_seconds"])) == (100, 200)
    assert longest["track"] == "stream 7"
    shares = {cause: row["share"] for cause, row in rows.items()}
    assert shares == pytest.approx({cause: row["seconds"] * 1e9 / 1000 for cause, row in rows.items()})


@pytest.mark.parametrize("name", ["c10d::barrier", "c10d::monitored_barrier_"])
def test_a_gpu_that_waits_at_a_barrier_of_the_host_waits_for_a_collective(tmp_path: Path, name: str) -> None:
    events = [
        step(0, 0, 300),
        launch(0, 10, 1),
        kernel(20, 100, correlation=1),
        annotation(110, 180, name),
        launch(185, 190, 2),
        kernel(200, 300, correlation=2),
    ]
    rows = {row["cause"]: to_ns(row["seconds"]) for row in load_ranks(tmp_path, {0: events}).idle()}
    assert rows["waiting for a collective"] == 70


def test_work_that_waits_long_after_its_launch_is_not_waiting_for_the_host(tmp_path: Path) -> None:
    events = [
        kernel(0, 1_000, correlation=1),
        launch(1_400, 2_000, 2),
        kernel(900_000, 1_000_000, correlation=2),  # as behind an event of another stream
        launch(1_200_000, 1_201_000, 3),
        kernel(1_400_000, 1_500_000, correlation=3),  # as a CUDA graph that is launched
    ]
    rows = {row["cause"]: row for row in load_ranks(tmp_path, {0: events}).idle()}
    assert to_ns(rows["host-bound"]["seconds"]) == 1_000 + 400_000
    assert to_ns(rows["other"]["seconds"]) == 898_000


def test_synchronizations_on_a_stream_are_idle_time(tmp_path: Path) -> None:
    sync = make_slice("Stream Sync", 100, 300, cat="cuda_sync", pid=0, tid=7, correlation=9)
    context = make_slice("Context Sync", 50, 400, cat="cuda_sync", pid=0, tid=-1)
    events = [kernel(0, 100), sync, context, kernel(450, 500)]
    trace = load_ranks(tmp_path, {0: events})
    (row,) = trace.breakdown()
    assert to_ns(row["compute_seconds"]) == 150 and to_ns(row["idle_seconds"]) == 350
    assert [kernel["name"] for kernel in trace.kernels()] == ["gemm"]


@pytest.mark.parametrize("category", ["cuda_runtime", "privateuse1_runtime"])
@pytest.mark.parametrize("is_paired", [False, True])
def test_launches_are_found_in_begin_and_end_events_and_of_other_devices(
    tmp_path: Path, category: str, is_paired: bool
) -> None:
    events = [
        launch(0, 10, 1),
        kernel(20, 100, correlation=1),
        launch(150, 160, 2),
        kernel(170, 300, correlation=2),
    ]
    for event in events:
        event["cat"] = category if event["cat"] == "cuda_runtime" else event["cat"]
    if is_paired:
        ends = [
            {"ph": "E", **{key: one[key] for key in ("pid", "tid")}, "ts": one["ts"] + one["dur"]}
            for one in events
        ]
        events = [one for pair in zip(events, ends, strict=True) for one in pair]
        for event in events[::2]:
            event["ph"] = "B"
            del event["dur"]
    trace = load_ranks(tmp_path, {0: events})
    assert {row["cause"]: to_ns(row["seconds"]) for row in trace.idle()}["host-bound"] == 20 + 70
    again = Trace.load(trace.to_chrome(tmp_path / "merged.json.gz"))
    assert again.summary().sentences == trace.summary().sentences


def test_collectives_of_hccl_are_communication(tmp_path: Path) -> None:
    events = [kernel(0, 100), kernel(100, 150, "hcom_allReduce__612_0", 9)]
    (row,) = load_ranks(tmp_path, {0: events}).breakdown()
    assert to_ns(row["communication_seconds"]) == 50


def test_streams_of_nsight_systems_are_gpu_work(tmp_path: Path) -> None:
    """Converters name processes "Device 0" and threads "Stream 7"; all categories are "cuda"."""
    events = [
        {"ph": "X", "cat": "cuda", "name": name, "pid": "Device 0", "tid": tid, "ts": ts, "dur": dur}
        for name, tid, ts, dur in (
            ("cudaLaunchKernel", "CUDA API 12", 0, 1),
            ("volta_sgemm", "Stream 7", 2, 8),
            ("ncclKernel_AllReduce", "Stream 9", 10, 5),
        )
    ]
    trace = load_ranks(tmp_path, {0: events})
    assert [(track.name, track.kind) for track in trace.tracks][:2] == [
        ("stream 7", "gpu"),
        ("stream 9", "gpu"),
    ]
    (row,) = trace.breakdown()
    assert to_ns(row["compute_seconds"]) == 8_000
    assert to_ns(row["exposed_communication_seconds"]) == 5_000


def test_the_last_step_lasts_until_the_gpu_has_done_its_work(tmp_path: Path) -> None:
    events = [
        step(4, 0, 100),
        step(5, 100, 200),
        launch(150, 160, 1),
        kernel(190, 350, correlation=1),
        launch(210, 220, 2),
        kernel(360, 400, correlation=2),
    ]
    rows = load_ranks(tmp_path, {0: events}).steps()
    assert [(row["step"], to_ns(row["span_seconds"])) for row in rows] == [(4, 100), (5, 250)]
    assert to_ns(rows[1]["compute_seconds"]) == 160


def test_a_gpu_that_is_always_behind_makes_the_last_step_no_longer(tmp_path: Path) -> None:
    """The recording begins with the work of earlier steps: that at its end must not count on top of it."""
    events = []
    for number in range(6):
        begin = 100 * number
        events += [step(number, begin, begin + 100), launch(begin, begin + 5, number)]
        # The GPU is 150 ns behind its host.
        events.append(kernel(begin + 150, begin + 210, correlation=number))
    # Their launches were before the recording.
    events += [
        kernel(0, 20, correlation=97),
        kernel(50, 110, correlation=98),
        kernel(120, 150, correlation=99),
    ]
    trace = load_ranks(tmp_path, {0: events})
    rows = trace.steps()
    assert [to_ns(row["span_seconds"]) for row in rows] == [100] * 6
    assert not any(row["is_outlier"] for row in rows)
    assert {to_ns(row["compute_seconds"]) for row in rows[2:5]} == {60}
    assert to_ns(rows[5]["compute_seconds"]) == 60
    assert not any("Step 5" in text for text in trace.summary().sentences)


def test_a_gpu_that_falls_behind_makes_no_step_an_outlier(tmp_path: Path) -> None:
    """The host launches a step in 100 ns, the GPU needs 200: it has as much left after the last one."""
    events = []
    for number in range(6):
        begin = 100 * number
        events += [step(number, begin, begin + 100), launch(begin, begin + 5, number)]
        events.append(kernel(2 * begin + 10, 2 * begin + 210, correlation=number))
    trace = load_ranks(tmp_path, {0: events})
    rows = trace.steps()
    assert to_ns(rows[5]["span_seconds"]) == 710 and not any(row["is_outlier"] for row in rows)
    assert not any(text.startswith("Step 5") for text in trace.summary().sentences)


def test_outlying_steps() -> None:
    steady = np.array([100, 101, 99, 100, 102, 100], np.int64)
    assert mark_outliers(steady) == [False] * 6
    assert mark_outliers(np.append(steady, 130)) == [False] * 6 + [True]
    assert mark_outliers(np.append(steady, 108)) == [False] * 7  # above the noise, but within a tenth
    assert mark_outliers(np.array([100, 400, 100], np.int64)) == [False] * 3  # three steps cannot tell
    # The median deviation of these steps is 10: five of them, scaled, are 74.
    noisy = np.array([100, 110, 90, 120, 80, 100, 110, 90], np.int64)
    assert mark_outliers(np.append(noisy, 170)) == [False] * 9
    assert mark_outliers(np.append(noisy, 180)) == [False] * 8 + [True]


def test_malformed_arguments_are_absent(tmp_path: Path) -> None:
    """A correlation id that does not fit a column, or is not a number, links nothing."""
    events = [
        launch(0, 5, 10**30),
        kernel(10, 20, correlation=10**30),
        launch(20, 25, 3),
        kernel(30, 40, correlation="3"),
        kernel(50, 60, correlation=[]),
    ]
    rows = {row["cause"]: to_ns(row["seconds"]) for row in load_ranks(tmp_path, {0: events}).idle()}
    assert rows["host-bound"] == 10 and rows["other"] == 20


def test_empty_traces_and_ranks_without_work_have_rows(tmp_path: Path) -> None:
    trace = load_ranks(tmp_path, {0: [], 1: [operator(0, 10)]})
    assert [row["span_seconds"] for row in trace.breakdown()] == [0, 1e-8]
    assert len(trace.steps()) == 0 and list(trace.steps().to_frame().columns)[:2] == ["rank", "step"]
    assert len(trace.idle()) == 8 and trace.overlap()[0]["share"] is None


def test_a_million_intervals_are_merged_and_subtracted() -> None:
    """Comparing all pairs would take hours, and a row of the pairs' matrix would not fit the memory."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, 10**9, 10**6)
    merged = merge_intervals(start, start + rng.integers(1, 3_000, 10**6))
    assert 0 < merged.total_ns < 1.01 * 10**9
    assert subtract(merged, merged).total_ns == 0


@pytest.mark.parametrize("name", ["breakdown", "steps", "overlap", "idle"])
def test_recorded_gloo_ranks_have_every_table(name: str) -> None:
    trace = Trace.load(Path(__file__).parents[2] / "fixtures" / "trace_2_ranks")
    table = getattr(trace, name)()
    assert {row["rank"] for row in table} == {0, 1}
    if name == "breakdown":
        assert all(row["communication_seconds"] > 0 and row["compute_seconds"] > 0 for row in table)
