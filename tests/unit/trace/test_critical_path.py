"""Tests of the critical path: known chains, and that its parts touch on any trace."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_events import (
    Events,
    all_reduce,
    annotation,
    copy,
    cpu_events,
    gpu_events,
    kernel,
    launch,
    load_ranks,
    make_slice,
    operator,
    step,
    to_ns,
)

from shardscope.trace import Trace
from shardscope.trace.analysis.critical_path import PYTHON, WAIT, CriticalPath

ARGS = {"Collective name": "allreduce", "In msg nelems": 8, "Group size": 2, "Process Group Ranks": "[0, 1]"}


def shorten(path: CriticalPath) -> list[tuple[int, str, int]]:
    return [(row["rank"], row["name"], to_ns(row["seconds"])) for row in path]


def check_that_parts_touch(path: CriticalPath) -> None:
    """Each part begins where the one before it ends, so the seconds add up to the path's span."""
    for before, after in pairwise(path):
        assert to_ns(before["start_seconds"] + before["seconds"]) == to_ns(after["start_seconds"])
    assert all(row["seconds"] > 0 for row in path)


def test_a_stream_of_queued_kernels_is_the_path(tmp_path: Path) -> None:
    """The launches are early, so only the first one is on the path."""
    events = [
        operator(0, 40, "aten::mm"),
        launch(10, 20, 1),
        launch(20, 30, 2),
        kernel(50, 5_000, "first_gemm", correlation=1),
        kernel(5_100, 9_000, "second_gemm", correlation=2),
    ]
    path = load_ranks(tmp_path, {0: events}).critical_path()
    assert shorten(path) == [
        (0, "aten::mm", 10),
        (0, "cudaLaunchKernel", 40),
        (0, "first_gemm", 4950),
        (0, WAIT, 100),
        (0, "second_gemm", 3900),
    ]
    check_that_parts_touch(path)
    assert list(path.to_frame().columns) == ["rank", "track", "name", "start_seconds", "seconds"]
    assert path.sum_by_kind()[0]["kind"] == "compute" and to_ns(path.seconds) == 9000


def test_autograds_nodes_on_a_cpu_rank_are_the_operators_inside(tmp_path: Path) -> None:
    events = [
        operator(0, 1000, "autograd::engine::evaluate_function: MmBackward0"),
        operator(100, 900, "aten::mm"),
        operator(1000, 1100, "aten::add"),
    ]
    path = load_ranks(tmp_path, {0: events}).critical_path()
    assert shorten(path) == [(0, PYTHON, 100), (0, "aten::mm", 800), (0, PYTHON, 100), (0, "aten::add", 100)]
    assert {row["kind"]: to_ns(row["seconds"]) for row in path.sum_by_kind()} == {"compute": 900, "host": 200}
    check_that_parts_touch(path)


def test_the_data_loader_of_a_cpu_rank_keeps_its_name(tmp_path: Path) -> None:
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    events = [operator(0, 1000, loader), operator(900, 950, "aten::stack"), operator(1000, 1100, "aten::mm")]
    path = load_ranks(tmp_path, {0: events}).critical_path()
    assert shorten(path) == [(0, loader, 1000), (0, "aten::mm", 100)]


def test_a_late_launch_puts_the_host_on_the_path(tmp_path: Path) -> None:
    events = [
        operator(0, 10, "aten::mm"),
        launch(0, 10, 1),
        kernel(10, 20, correlation=1),
        operator(5_000, 5_100, "aten::slow_preparation"),
        launch(5_100, 5_200, 2),
        kernel(5_300, 9_000, "late_gemm", correlation=2),
    ]
    path = load_ranks(tmp_path, {0: events}).critical_path()
    assert shorten(path) == [
        (0, "aten::mm", 10),
        (0, PYTHON, 4_990),
        (0, "aten::slow_preparation", 100),
        (0, "cudaLaunchKernel", 200),
        (0, "late_gemm", 3_700),
    ]


@pytest.mark.parametrize(
    ("own_end", "expected"),
    [(9_990, "own_gemm"), (400, "side_gemm")],
    ids=["the stream's previous kernel", "another stream's kernel"],
)
def test_a_kernel_follows_its_own_stream_unless_that_was_idle(
    tmp_path: Path, own_end: int, expected: str
) -> None:
    """Streams wait for each other by events, which leave no trace but the idle time of one of them."""
    events = [
        launch(0, 10, 1),
        launch(10, 20, 2),
        launch(20, 30, 3),
        kernel(100, own_end, "own_gemm", 7, correlation=1),
        kernel(100, 10_000, "side_gemm", 8, correlation=2),
        kernel(10_010, 20_000, "last_gemm", 7, correlation=3),
    ]
    path = load_ranks(tmp_path, {0: events}).critical_path()
    names = [name for _, name, _ in shorten(path)]
    assert names[-3:] == [expected, WAIT, "last_gemm"]
    check_that_parts_touch(path)
    assert to_ns(path.seconds) == 20_000


def test_the_host_that_waited_for_the_gpu_leads_back_to_it(tmp_path: Path) -> None:
    """loss.item(): a kernel, the synchronization that waits for it, and the launch after it."""
    wait = make_slice("cudaStreamSynchronize", 100, 5_050, cat="cuda_runtime", pid=100, tid=100)
    events = [
        launch(0, 10, 1),
        kernel(20, 5_000, "first_gemm", correlation=1),
        wait,
        launch(5_100, 5_120, 2),
        kernel(5_150, 9_000, "second_gemm", correlation=2),
    ]
    names = [name for _, name, _ in shorten(load_ranks(tmp_path, {0: events}).critical_path())]
    assert names == [
        "cudaLaunchKernel", "first_gemm", "cudaStreamSynchronize", PYTHON, "cudaLaunchKernel", "second_gemm",
    ]  # fmt: skip


def test_the_path_goes_through_the_rank_that_arrives_last(tmp_path: Path) -> None:
    """Rank 0 waits in the all-reduce from 100; rank 1 computes until 8,000: its kernel is on the path."""
    early = [
        launch(0, 5, 1),
        kernel(10, 100, "fast_gemm", 7, correlation=1),
        launch(5, 9, 2),
        all_reduce(100, 9_000, 7, correlation=2, **ARGS),
        launch(9, 10, 3),
        kernel(9_000, 9_900, "after", 7, correlation=3),
    ]
    late = [
        launch(0, 5, 1),
        kernel(10, 8_000, "slow_gemm", 7, correlation=1),
        launch(5, 9, 2),
        all_reduce(8_000, 9_000, 7, correlation=2, **ARGS),
    ]
    path = load_ranks(tmp_path, {0: early, 1: late}).critical_path()
    assert [(rank, name.split("_")[0], ns) for rank, name, ns in shorten(path)] == [
        (1, "cudaLaunchKernel", 10),
        (1, "slow", 7_990),
        (0, "ncclDevKernel", 1_000),
        (0, "after", 900),
    ]
    check_that_parts_touch(path)


def test_gloo_ranks_have_a_path_through_the_late_rank(tmp_path: Path) -> None:
    shape = {"Input Dims": [[100]], "Input type": ["float"]}
    early = [
        operator(0, 100, "aten::mm"),
        annotation(100, 900, "gloo:all_reduce", 200, **shape),
        operator(910, 1_000, "aten::mul"),
    ]
    late = [operator(0, 800, "aten::slow"), annotation(800, 900, "gloo:all_reduce", 200, **shape)]
    path = load_ranks(tmp_path, {0: early, 1: late}).critical_path()
    assert shorten(path) == [
        (1, "aten::slow", 800),
        (0, "gloo:all_reduce", 100),
        (0, PYTHON, 10),
        (0, "aten::mul", 90),
    ]


def test_the_path_of_one_step(tmp_path: Path) -> None:
    events = [step(7, 0, 100), step(8, 100, 200), operator(20, 90, "aten::a"), operator(110, 190, "aten::b")]
    trace = load_ranks(tmp_path, {0: events})
    path = trace.critical_path(step=8)
    assert shorten(path) == [(0, PYTHON, 10), (0, "aten::b", 80), (0, PYTHON, 10)]
    with pytest.raises(ValueError, match=r"step 9 was not recorded. Allowed: \[7, 8\]"):
        trace.critical_path(step=9)


@given(st.lists(st.one_of(gpu_events(), cpu_events()), min_size=1, max_size=3))
def test_parts_of_any_path_touch_and_end_last(ranks: list[Events]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = load_ranks(Path(folder), dict(enumerate(ranks)))
    path = trace.critical_path()
    check_that_parts_touch(path)
    marked = [one for rank in trace.activity.ranks for one in rank.steps]
    end = max(one.end_ns for one in marked or trace.activity.ranks)
    assert to_ns(path[-1]["start_seconds"] + path[-1]["seconds"]) == end
    assert to_ns(path[0]["start_seconds"]) <= max(one.start_ns for one in marked or trace.activity.ranks)


def test_the_path_begins_with_the_first_marked_step_and_ends_with_the_last(tmp_path: Path) -> None:
    """A profiler writes on for a while after the last step."""
    work = [operator(10, 90, "aten::first"), operator(110, 190, "aten::a"), operator(210, 900, "aten::last")]
    trace = load_ranks(tmp_path, {0: [*work, step(7, 100, 150), step(8, 150, 200)]})
    assert shorten(trace.critical_path()) == [(0, PYTHON, 10), (0, "aten::a", 80), (0, PYTHON, 10)]


def test_copies_to_pageable_memory_hold_up_the_host(tmp_path: Path) -> None:
    events = [
        launch(0, 5, 1),
        kernel(10, 4_000, "gemm", 7, correlation=1),
        launch(20, 4_500, 2),
        copy(4_000, 4_400, 7, correlation=2),
        launch(4_600, 4_610, 3),
        kernel(4_700, 9_000, "next_gemm", 7, correlation=3),
    ]
    names = [name for _, name, _ in shorten(load_ranks(tmp_path, {0: events}).critical_path())]
    assert names[:3] == ["cudaLaunchKernel", "gemm", "Memcpy HtoD (Pinned -> Device)"]


def test_an_empty_trace_has_an_empty_path(tmp_path: Path) -> None:
    path = load_ranks(tmp_path, {0: []}).critical_path()
    assert len(path) == 0 and path.seconds == 0


def test_recorded_gloo_ranks_have_a_path() -> None:
    path = Trace.load(Path(__file__).parents[2] / "fixtures" / "trace_2_ranks").critical_path()
    check_that_parts_touch(path)
    assert {row["kind"] for row in path.sum_by_kind()} == {"compute", "communication", "host"}


def test_launch_delays_and_queue_lengths(tmp_path: Path) -> None:
    """Three launches at 0, 10 and 20; they begin at 5, 100 and 200: at 20 two of them wait."""
    events = [launch(10 * number, 10 * number + 5, number) for number in range(3)]
    events += [
        kernel(5, 100, correlation=0),
        kernel(100, 200, correlation=1),
        kernel(200, 205, correlation=2),
    ]
    events += [copy(300, 310), launch(400, 410, 9), all_reduce(395, 500, correlation=9)]
    rows = load_ranks(tmp_path, {0: events}).launches()
    assert [(row["track"], row["num_launches"], row["max_queue_length"]) for row in rows] == [
        ("stream 7", 3, 2),
        ("stream 20", 1, 0),  # clocks of host and GPU differ: it cannot begin before its launch
    ]
    first = rows[0]
    assert (to_ns(first["median_delay_seconds"]), to_ns(first["max_delay_seconds"])) == (90, 180)
    assert first["mean_queue_length"] == pytest.approx((5 + 90 + 180) / 200)
    assert to_ns(first["start_seconds"]) == 20
    assert "start_seconds" not in rows.to_frame().columns


@given(gpu_events())
def test_queues_are_never_negative(events: Events) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = load_ranks(Path(folder), {0: events}).launches()
    for row in rows:
        assert 0 <= row["mean_queue_length"] <= row["max_queue_length"] + 1e-9
        assert 0 <= row["median_delay_seconds"] <= row["max_delay_seconds"]
