"""Tests of counters and instants for display."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.unit.trace.trace_events import Events, load_ranks, operator

from shardscope.trace.counters import Counter, MarkTiler


def counter(name: str, time_us: float, **values: object) -> dict[str, object]:
    return {"ph": "C", "name": name, "pid": 0, "tid": 0, "ts": time_us, "args": values}


def test_each_number_of_a_counter_is_a_series(tmp_path: Path) -> None:
    events: Events = [operator(0, 100_000), counter("bus", 3, read=1, write=2.5), counter("bus", 1, read=4)]
    events += [counter("text", 1, value="many", is_on=True)]
    found = MarkTiler(load_ranks(tmp_path, {0: events, 1: [operator(0, 10)]})).counters
    assert {(one.rank, one.name): one.value.tolist() for one in found} == {
        (0, "bus read"): [4, 1],
        (0, "bus write"): [2.5],
    }


def test_cut_keeps_peaks_and_the_value_before() -> None:
    values = np.zeros(100_000)
    values[54_321] = 9
    series = Counter(rank=0, name="x", is_bytes=False, time_ns=np.arange(100_000), value=values)
    time, value = series.cut(50_000, 60_000, 100)
    assert len(time) <= 250 and value.max() == 9 and time[0] <= 50_000
    assert np.all(np.diff(time) > 0)
    time, _ = series.cut(1_000.5, 1_010.5, 100)
    assert time.tolist() == list(range(1_000, 1_011))


def test_instants_of_one_pixel_are_one_tick(tmp_path: Path) -> None:
    events: Events = [operator(0, 1_000_000)]
    events += [{"ph": "i", "name": "tick", "pid": 100, "tid": 100, "ts": t, "s": "t"} for t in (1, 2, 900)]
    events.append({"ph": "i", "name": "of no thread", "pid": 5, "tid": 5, "ts": 500, "s": "t"})
    tiler = MarkTiler(load_ranks(tmp_path, {0: events}))
    columns = tiler.cut_instants(0, 1e6, 10)
    assert columns["count"].tolist() == [2, 1, 1]
    assert [tiler.trace.names[i] for i in columns["name"].tolist()] == ["tick", "of no thread", "tick"]
    assert tiler.cut_instants(2e6, 3e6, 10)["time"].tolist() == []
