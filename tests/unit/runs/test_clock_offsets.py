"""Runs whose nodes, or whose readers, have clocks that are minutes apart."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shardscope.records.clock_offsets import read_clock_offsets, sum_seconds
from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import write_json
from shardscope.records.nodes import read_nodes
from shardscope.runs import run_status
from shardscope.runs.explain.failure import find_first_failure
from shardscope.runs.run_status import RunStatus
from shardscope.runs.watch.pace import Pace


def make_run(path: Path, *, seconds: float, **more: object) -> RunFolder:
    """Return a run of two nodes with two ranks each; the clock of node 1 is ``seconds`` ahead."""
    folder = RunFolder(path)
    folder.create()
    write_json(folder.run_json, {"shardscope_run": 1, "num_nodes": 2, "world_size": 4, **more})
    write_json(folder.job, {"scheduler": "slurm", "partition": "debug"})
    (folder.path / "nodes").mkdir()
    for number in range(2):
        NodeFolder(path, number, 2).create_own()
    for rank in range(4):
        write_json(folder.rank(rank), {"ready": 1000.0 + 0.1 * rank + (seconds if rank > 1 else 0.0)})
    return folder


@pytest.mark.parametrize("seconds", [400.0, -400.0])
def test_offsets_are_measured_where_the_ranks_begin(tmp_path: Path, seconds: float) -> None:
    folder = make_run(tmp_path / "run", seconds=seconds)
    offsets = read_clock_offsets(folder)
    assert offsets.of_node(0) == offsets.of_rank(1) == 0.0
    assert offsets.of_rank(3) == pytest.approx(seconds, abs=1)
    assert [node.clock_seconds for node in read_nodes(folder, 2, 4)] == [0.0, offsets.of_node(1)]


def test_clocks_that_agree_have_no_offset(tmp_path: Path) -> None:
    assert read_clock_offsets(make_run(tmp_path / "run", seconds=1.0)).seconds == {}


@pytest.mark.parametrize("seconds", [400.0, -400.0])
def test_the_first_failure_is_that_of_the_rank_that_failed_first(tmp_path: Path, seconds: float) -> None:
    folder = make_run(tmp_path / "run", seconds=seconds)
    for rank, when in ((0, 1052.0), (2, 1050.0 + seconds), (3, 1051.0 + seconds)):
        write_json(folder.error(rank), {"time": when, "monotonic": -when, "summary": f"raised {rank}"})
    failure = find_first_failure(folder, 4)
    assert failure is not None and failure.rank == 2


def test_a_rank_whose_clock_is_behind_is_not_late() -> None:
    pace = Pace()
    for rank, seconds in ((0, 0.0), (1, -400.0)):
        for step in range(20 if rank == 0 else 16):
            pace.add([{"rank": rank, "step": step, "time": step + seconds, "step_seconds": 0.1}])
    pace.seconds_ahead = {1: -400.0}
    assert pace.slowest is not None and pace.slowest.steps_behind == 4
    pace.add([{"rank": 1, "step": step, "time": 15.5 - 400, "step_seconds": 0.1} for step in (16, 17)])
    assert pace.slowest.steps_behind == 0


def test_durations_leave_out_steps_back() -> None:
    # Queued by the login node's clock, started and finished by the node's, which is behind.
    assert sum_seconds([1000.0, 700.0, 760.0]) == 60.0
    assert sum_seconds([]) == 0.0


@pytest.mark.parametrize(("machine", "expected"), [("", "starting"), ("another", "starting")])
def test_a_launch_from_a_machine_with_another_clock_is_not_lost(
    tmp_path: Path, machine: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    ours = run_status.identify_machine()
    write_json(folder.run_json, {"shardscope_run": 1, "machine": machine or ours}, as_is=("machine",))
    folder.set_status("starting", "")
    status = RunStatus(folder)
    real = time.time
    if machine:  # Five minutes ahead of the machine that launched.
        monkeypatch.setattr(run_status.time, "time", lambda: real() + 300)
    assert status.read()["status"] == expected
    # Half an hour later it is.
    monotonic = time.monotonic
    monkeypatch.setattr(run_status.time, "time", lambda: real() + 1800)
    monkeypatch.setattr(run_status.time, "monotonic", lambda: monotonic() + 1800)
    assert status.read()["status"] == "lost"


def test_a_launch_that_was_lost_hours_ago_is_lost_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    write_json(folder.run_json, {"shardscope_run": 1, "machine": "another"}, as_is=("machine",))
    folder.set_status("starting", "")
    real = time.time
    monkeypatch.setattr(run_status.time, "time", lambda: real() + 2 * 3600)
    assert RunStatus(folder).read()["status"] == "lost"
