"""Tests of reading the end of runs with many thousand lines: no reader loads or parses all of them."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from tests.requirements import thorough

import shardscope as ss
from shardscope.records import json_files as records
from shardscope.records import json_values
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line, encode, write_json
from shardscope.runs.run import Run
from shardscope.runs.watch.logged_memory import LoggedMemory
from shardscope_widgets import StepView
from shardscope_widgets.time.rows import RunSteps

NUM_LINES = 60_000


def write(folder: RunFolder, rank: int, records: list[dict[str, Any]]) -> None:
    with folder.events(rank).open("ab") as file:
        file.writelines(encode(record) for record in records)


def make_line(step: int, rank: int, **metrics: Any) -> dict[str, Any]:
    return {"step": step, "rank": rank, "time": float(step), **metrics}


def test_latest_and_highest_memory_of_each_rank_are_read(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "PIECE_BYTES", 100)
    told = LoggedMemory(folder, 4)
    assert told.read() == []
    write(folder, 0, [make_line(0, 0, loss=1.0), make_line(1, 0, memory_bytes=7, peak_memory_bytes=30)])
    write(folder, 0, [make_line(2, 0, memory_bytes=9, peak_memory_bytes=20), make_line(3, 0, loss=2.0)])
    write(folder, 1, [make_line(4, 1, peak_memory_bytes=5)])
    write(
        folder, 3, [make_line(5, 3, words='say "memory_bytes": 8, "peak_memory_bytes": 9}', memory_bytes=1.5)]
    )
    assert told.read() == [
        {"rank": 0, "memory_bytes": 9, "step": 2, "time": 2.0, "peak_memory_bytes": 30},
        {"rank": 1, "memory_bytes": None, "step": 4, "time": 4.0, "peak_memory_bytes": 5},
    ]
    with folder.events(0).open("ab") as file:
        half = encode(make_line(6, 0, memory_bytes=50))
        file.write(half[:-9])
    assert told.read()[0]["peak_memory_bytes"] == 30
    with folder.events(0).open("ab") as file:
        file.write(half[-9:])
    assert told.read()[0] == {
        "rank": 0, "memory_bytes": 50, "step": 6, "time": 6.0, "peak_memory_bytes": 50
    }  # fmt: skip
    folder.events(0).write_bytes(encode(make_line(0, 0, memory_bytes=3)))
    assert told.read()[0]["peak_memory_bytes"] == 3


@pytest.fixture
def long_run(folder: RunFolder) -> Run:
    write(
        folder,
        0,
        [
            make_line(
                step, 0, loss=1.0, step_seconds=0.25, memory_bytes=1000, peak_memory_bytes=2000 + step % 7
            )
            for step in range(NUM_LINES)
        ],
    )
    recipe = ss.Recipe(seq_len=512, global_batch_size=64)
    plan = ss.Plan(ss.models["gpt2"], ss.Cluster.parse("8xh100-sxm-80gb"), recipe, ss.Layout.fsdp2())
    write_json(folder.run_json, {"world_size": 1, "created": 1.0, "plan": json.loads(plan.to_json())})
    append_line(folder.status, {"time": 1.0, "status": "finished", "reason": "done"})
    phases = {"forward": {"parameters": 2**20, "activations": 2**24}}
    write_json(folder.engine_report(0), {"memory": {"device": "cpu", "step": 2, "phases": phases}})
    return Run.attach(folder.path)


@thorough()
def test_memory_of_a_long_run_parses_one_line(long_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []

    def parse_object(data: bytes) -> dict[str, Any]:
        parsed.append(data)
        return json_values.parse_object(data)

    monkeypatch.setattr(records, "parse_object", parse_object)
    tracemalloc.start()
    (memory,) = LoggedMemory(RunFolder(long_run.folder), 1).read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert memory["peak_memory_bytes"] == 2006 and memory["step"] == NUM_LINES - 1
    pieces = long_run.folder.joinpath("events", "rank-0.jsonl").stat().st_size // records.PIECE_BYTES
    assert len(parsed) <= pieces + 1
    assert peak < 6 * records.PIECE_BYTES


def test_the_time_view_reads_only_the_metrics_that_it_shows(
    long_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a run, beside a kernel that has other things to do."""

    def all_of_them(run: Run) -> Any:
        raise AssertionError("all records at once")

    monkeypatch.setattr(Run, "metrics", all_of_them)
    steps = RunSteps.from_run(long_run)
    assert steps is not None
    view = StepView(long_run.plan)
    view.add(long_run.plan, steps)
    assert view.shown is not None and view.shown.measured == (steps.num_steps, 0.25)
    assert 1000 < steps.num_steps < NUM_LINES
