"""Tests of the merged Chrome trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tests.unit.trace.trace_events import Events, kernel, load_ranks, operator

from shardscope.trace import Trace

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
    again = Trace.load(path)
    assert len(again) == len(trace) and len(again.flows[0]) == len(trace.flows[0])
    # Read again, all ranks are one: breakdown and kernels would be silently wrong.
    assert any("2 ranks in one file" in note for note in again.notes)
    assert not any("in one file" in note for note in trace.notes)


def test_late_times_stay_exact_and_broken_arguments_are_empty(tmp_path: Path) -> None:
    hour = 3_600_000_000_000
    events: Events = [operator(0, 10), kernel(hour + 1, hour + 3)]
    events.append({"ph": "C", "name": "memory", "pid": 0, "tid": 0, "ts": 1.5, "args": {"used": 7}})
    trace = load_ranks(tmp_path, {0: events})
    text = trace.to_chrome(tmp_path / "merged.json").read_text()
    assert '"ts":3600000000.001,"dur":0.002' in text
    counters = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "C"]
    assert [event["args"] for event in counters] == [{"used": 7}]
