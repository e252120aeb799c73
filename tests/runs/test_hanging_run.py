"""One launch that hangs, is told so while it goes on, and is killed: what its folder says afterwards."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path
from typing import Any

import hanging_tasks as tasks
import pytest
from run_helpers import list_processes, seconds_until
from test_stop import rank_pid

from shardscope.runs.launch.launch import launch

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("bounded_time", "nothing_left")]

KEY = "story-0123456789-of-the-user"


def test_fault_05_10_a_hang_is_reported_with_stacks_and_a_killed_rank_with_memory(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDSCOPE_HANG_SECONDS", "1")
    monkeypatch.setenv("STORY_API_KEY", KEY)
    run = launch(plan, tasks.hangs, folder=tmp_path)
    seconds_until(lambda: "rank 1: stuck_elsewhere" in run.reason or run.status == "failed")
    assert run.status == "running", run.error
    assert (
        run.reason.startswith("no step for ") and "rank 1: stuck_elsewhere (hanging_tasks.py:" in run.reason
    ), run.reason
    assert run.is_hanging
    assert "rank 0: all_reduce (distributed_c10d.py:" in run.reason, run.reason
    assert ", called from hangs (hanging_tasks.py:" in run.reason, run.reason
    assert "in stuck_elsewhere" in run.logs(1) and "in all_reduce" in run.logs(0)
    seconds_until(lambda: any((run.folder / "tensorboard").glob("rank-1/events.out.tfevents.*")), 5)

    os.kill(rank_pid(run, 1), signal.SIGKILL)
    assert run.wait(20) == "failed"
    assert not run.is_hanging
    assert run.reason.startswith("rank 1 was killed by SIGKILL: the kernel"), run.reason
    assert "host memory ran out" not in run.reason, "no counter moved: this test sent the signal"
    assert "it last used" in run.reason and " free" in run.reason
    assert run.error is not None and "These ranks only lost their peer" in run.error

    # The status waits a second for the table and for secrets in logs; on a slow disk the rest follows it.
    seconds_until(lambda: not list_processes(tmp_path))
    with (run.folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["rank"], row["step"]) for row in rows] == [
        (str(r), str(s)) for r in (0, 1) for s in range(12)
    ]
    assert float(rows[1]["loss"]) == 0.5 and rows[0]["note"] == "key " + "*" * len(KEY)
    written = {file: file.read_bytes() for file in run.folder.rglob("*") if file.is_file()}
    assert b"my key is **" in written[run.folder / "logs" / "rank-0.log"]
    for secret in (KEY.encode(), b"a1B2a1B2"):
        assert not [file for file, data in written.items() if secret in data]
    assert not [path for path in run.folder.rglob("*") if path.stat().st_mode & 0o77]


def test_fault_05_a_standstill_of_a_task_that_logs_nothing(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDSCOPE_HANG_SECONDS", "0.3")
    run = launch(plan, tasks.waits_in_silence, folder=tmp_path)
    seconds_until(lambda: "rank 1: stuck_elsewhere" in run.reason or run.status == "failed")
    assert run.status == "running" and run.reason.startswith("no activity for "), run.reason
    assert run.is_hanging
    assert "rank 0: all_reduce (distributed_c10d.py:" in run.reason, run.reason
    assert "in stuck_elsewhere" in run.logs(1)
    run.stop()
    assert run.wait(5) == "stopped"
