"""Tests of who requested a stop, and of whether ranks check for requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_runs import wait_until
from written_runs import PLAN

from shardscope.records.folder import RunFolder, Status
from shardscope.records.json_files import append_line, read_json, read_lines, write_json
from shardscope.runs import run_status
from shardscope.runs.launch.context import Context
from shardscope.runs.run import Run
from shardscope.runs.stop_request import (
    READS_STOPS,
    describe_stop_request,
    every_rank_reads_stops,
    find_notebook,
    record_reader,
)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ({}, "run.stop() was called"),
        ({"checkpoint": True}, "run.stop(checkpoint=True) was called"),
        ({"button": "Stop", "notebook": "a.ipynb"}, "Stop was pressed in a.ipynb"),
        ({"button": "Save and stop", "checkpoint": True}, "Save and stop was pressed"),
        ({"sweep": True, "checkpoint": True}, "sweep.stop() was called"),
        ({"button": ["odd"], "notebook": 3}, "Stop was pressed"),
        ({"notebook": "a\n\x1b" + 200 * "x"}, "run.stop() was called in a" + 99 * "x"),
    ],
)
def test_the_origin_of_a_stop_request_is_described(command: dict[str, Any], words: str) -> None:
    assert describe_stop_request(command) == words


def test_the_notebook_is_the_one_that_jupyter_started_the_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert find_notebook() is None
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/lessons/00_studio.ipynb")
    assert find_notebook() == "00_studio.ipynb"
    monkeypatch.setenv("JPY_SESSION_NAME", "console-1-5f0c")
    assert find_notebook() is None


def test_stop_requests_count_as_read_once_every_rank_has_read_them(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    for rank in (0, 1):
        write_json(folder.rank(rank), {"pid": 100 + rank})
        assert not every_rank_reads_stops(folder, 2)
        record_reader(folder, rank, READS_STOPS)
    assert every_rank_reads_stops(folder, 2)
    assert (read_json(folder.rank(1)) or {})["pid"] == 101, "what else is recorded of it stays"


def test_a_stop_reaches_a_run_that_counts_as_lost_for_a_while(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its supervisor on another machine has given no sign of life, and then goes on."""
    monkeypatch.setattr(run_status, "HEARTBEAT_PATIENCE_SECONDS", 0.0)
    folder = RunFolder(tmp_path / "run")
    folder.create()
    write_json(folder.run_json, {"world_size": 1, "created": 1.0})
    folder.set_status("running", "1 rank at work")
    write_json(folder.supervisor, {"pid": 100, "started": 1.0, "machine": "another"})
    run = Run(folder)
    assert wait_until(lambda: run.status == "lost")
    run.stop()
    assert [line["command"] for line in read_lines(folder.control)] == ["stop"]
    monkeypatch.setattr(run_status, "HEARTBEAT_PATIENCE_SECONDS", 60.0)
    assert run.status == "running"


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_a_stop_has_no_effect_on_a_run_that_has_ended(status: Status, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    write_json(folder.run_json, {"world_size": 1, "created": 1.0})
    folder.set_status(status, "for some reason")
    Run(folder).stop()
    assert not folder.control.exists()


def test_a_stop_without_a_checkpoint_stays_one(tmp_path: Path) -> None:
    """Ranks that read another one after it began a checkpoint, in which the supervisor ended them."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    device: Any = "cpu"
    ctx = Context(rank=0, world_size=1, device=device, plan=PLAN, folder=folder)
    append_line(folder.control, {"command": "stop", "checkpoint": True})
    assert ctx.poll()[0] and not ctx.stops_without_checkpoint
    # The supervisor does not end a checkpoint for it either.
    append_line(folder.control, {"command": "stop", "kernel_ended": True})
    assert ctx.poll()[0] and not ctx.stops_without_checkpoint
    append_line(folder.control, {"command": "stop", "checkpoint": False})
    append_line(folder.control, {"command": "stop", "checkpoint": True})
    assert ctx.poll()[0] and ctx.stops_without_checkpoint
