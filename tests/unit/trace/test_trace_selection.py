"""Tests of the context of one slice: arrows, callers, statistics of its name."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.trace.trace_events import all_reduce, kernel, launch, load_ranks, operator, step

from shardscope.trace import Trace
from shardscope.trace.analysis.selection import MAX_CONNECTIONS, SelectionContext, find_module

FIXTURES = Path(__file__).parents[2] / "fixtures"


def find(trace: Trace, name: str) -> list[int]:
    return [i for i in range(len(trace)) if trace.names[trace.name_index[i]].startswith(name)]


def test_operator_has_arrows_of_the_launches_inside(tmp_path: Path) -> None:
    events = [step(1, 0, 9_000), operator(10, 1_000)]
    for number in range(MAX_CONNECTIONS + 1):
        inside = 100 + 10 * number if number < 3 else 2_000 + 10 * number
        events += [launch(inside, inside + 5, number), kernel(3_000 + 20 * number, 3_010 + 20 * number)]
        events[-1]["args"]["correlation"] = number
    trace = load_ranks(tmp_path, {0: events})
    context = SelectionContext(trace)
    arrows = context.find_connections(find(trace, "aten::mm")[0])
    assert [arrow["kind"] for arrow in arrows] == ["launch"] * 3
    assert {trace.names[trace.name_index[arrow["target"]]] for arrow in arrows} == {"gemm"}
    assert context.find_connections(find(trace, "ProfilerStep")[0]) == []  # too many
    assert len(context.find_connections(find(trace, "gemm")[7])) == 1


def test_collectives_are_connected_across_ranks_only(tmp_path: Path) -> None:
    ranks = {rank: [kernel(0, 5), all_reduce(10 + rank, 20), all_reduce(30, 40)] for rank in range(3)}
    trace = load_ranks(tmp_path, ranks)
    first = find(trace, "nccl")[0]
    arrows = SelectionContext(trace).find_connections(first)
    assert {(arrow["kind"], arrow["source"]) for arrow in arrows} == {("collective", first)}
    starts = sorted(int(trace.start_ns[arrow["target"]]) for arrow in arrows)
    assert starts == [int(trace.start_ns[first]) + 1, int(trace.start_ns[first]) + 2]


def test_flows_of_a_recording_are_arrows() -> None:
    trace = Trace.load(FIXTURES / "trace_2_ranks")
    sources, targets = trace.flows
    arrows = SelectionContext(trace).find_connections(int(sources[0]))
    assert (int(sources[0]), int(targets[0])) in {(arrow["source"], arrow["target"]) for arrow in arrows}


def test_statistics_count_recursive_calls_once(tmp_path: Path) -> None:
    trace = load_ranks(
        tmp_path, {0: [operator(0, 100), operator(10, 60), operator(200, 250), kernel(0, 500)]}
    )
    assert SelectionContext(trace).measure_name(find(trace, "aten::mm")[0]) == {
        "rank": 0,
        "count": 3,
        "total_seconds": pytest.approx(150e-9),
        "mean_seconds": pytest.approx(200e-9 / 3),
        "min_seconds": pytest.approx(50e-9),
        "max_seconds": pytest.approx(100e-9),
        "share": pytest.approx(0.3),
        "num_on_all_ranks": 3,
    }


def test_callers_are_operators_and_then_python_frames() -> None:
    trace = Trace.load(FIXTURES / "trace_with_stacks")
    context = SelectionContext(trace)
    callers = context.find_callers(find(trace, "aten::addmm")[0])
    assert callers[0] == "aten::linear" and any(name.endswith("forward") for name in callers)
    assert find_module(callers, {}).startswith("MultiheadAttention_")
    assert find_module([], {"Module Hierarchy": "TOP.layer1"}) == "TOP.layer1"
    assert find_module([], {}) == ""
