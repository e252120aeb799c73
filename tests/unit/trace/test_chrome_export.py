"""Tests of the merged Chrome trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from tests.unit.trace.trace_events import Events, all_reduce, kernel, launch, load_ranks, operator, step

from shardscope.trace import Trace
from shardscope.trace.counters import find_counters

FIXTURE = Path(__file__).parents[2] / "fixtures" / "trace_2_ranks"


def test_merged_trace_has_every_slice_at_its_time_and_every_flow(tmp_path: Path) -> None:
    trace = Trace.load(FIXTURE)
    path = trace.to_chrome(tmp_path / "merged.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(trace)
    number = len(trace) // 2
    event, expected = slices[number], trace.slice(number)
    assert event["name"] == expected["name"] and event["pid"] == expected["rank"]
    assert event["args"] == expected["args"]
    shift = slices[0]["ts"] - int(trace.start_ns[0]) / 1e3
    assert round(event["ts"] - shift, 3) == int(trace.start_ns[number]) / 1e3
    assert round(event["dur"] * 1e3) == int(trace.duration_ns[number])
    for letter in "sf":
        ids = [event["id"] for event in events if event["ph"] == letter]
        assert len(ids) == len(set(ids)) > 0


TABLES = ("breakdown", "steps", "collectives", "idle", "overlap", "kernels", "stragglers", "launches")


def check_same_answers(trace: Trace, again: Trace) -> None:
    assert again.ranks == trace.ranks and again.world_size == trace.world_size
    assert again.tracks == trace.tracks and again.device_names == trace.device_names
    assert again.process_groups == trace.process_groups and again.notes == trace.notes
    for column in ("start_ns", "duration_ns", "track_index", "depth", "correlation", "parents"):
        assert np.array_equal(getattr(again, column), getattr(trace, column)), column
    assert np.array_equal(again.flows, trace.flows)
    for column in ("time_ns", "track_index", "rank_position", "phase"):
        assert np.array_equal(getattr(again.marks, column), getattr(trace.marks, column)), column
    for name in TABLES:
        assert getattr(again, name)().to_frame().equals(getattr(trace, name)().to_frame()), name


@pytest.mark.parametrize("name", ["trace_2_ranks", "trace_with_stacks"])
def test_a_merged_trace_has_its_ranks_and_answers_when_it_is_read_again(name: str, tmp_path: Path) -> None:
    trace = Trace.load(FIXTURE.parent / name)
    check_same_answers(trace, Trace.load(trace.to_chrome(tmp_path / "merged.json.gz")))


def test_some_ranks_of_a_job_are_merged_with_their_own_steps_and_counters(tmp_path: Path) -> None:
    ranks = {}
    for rank in (1, 2):
        # The ranks recorded different steps; the counters are of a process without slices.
        work = [operator(2, 30), launch(31, 33, 1), kernel(40, 60, correlation=1), all_reduce(60, 80 + rank)]
        counter = {"ph": "C", "name": "used", "pid": 9, "ts": -1.0, "args": {"a": rank}}
        ranks[rank] = [step(5 + rank, rank, 90), *work, counter]
    trace = load_ranks(tmp_path / "job", ranks, info={"world_size": 3})
    assert len(trace.notes) == 3, "a missing rank, and a missing step of each of the others"
    again = Trace.load(trace.to_chrome(tmp_path / "merged.json"))
    check_same_answers(trace, again)
    assert [counter.value.tolist() for counter in find_counters(again)] == [[1.0], [2.0]]


def test_a_merged_trace_with_other_processes_is_one_rank_and_says_so(tmp_path: Path) -> None:
    path = Trace.load(FIXTURE).to_chrome(tmp_path / "merged.json")
    data = json.loads(path.read_text())
    data["traceEvents"].append({**data["traceEvents"][-1], "ph": "X", "dur": 1.0, "pid": 77})
    path.write_text(json.dumps(data))
    trace = Trace.load(path)
    assert len(trace.ranks) == 1 and any("shown as one" in note for note in trace.notes)
    # With a header that cannot be read, it is a trace as any other.
    data["mergedRanks"] = [{"document": {"rank": -1}, "threads": []}]
    path.write_text(json.dumps(data))
    assert len(Trace.load(path).ranks) == 1


def test_late_times_stay_exact_and_broken_arguments_are_empty(tmp_path: Path) -> None:
    hour = 3_600_000_000_000
    events: Events = [operator(0, 10), kernel(hour + 1, hour + 3)]
    events.append({"ph": "C", "name": "memory", "pid": 0, "tid": 0, "ts": 1.5, "args": {"used": 7}})
    trace = load_ranks(tmp_path, {0: events})
    text = trace.to_chrome(tmp_path / "merged.json").read_text()
    assert '"ts":3600000000.001,"dur":0.002' in text
    counters = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "C"]
    assert [event["args"] for event in counters] == [{"used": 7}]
