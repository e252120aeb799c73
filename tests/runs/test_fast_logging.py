"""Tasks that log without a pause: the run is stopped in time, and nobody's memory grows with it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import run_tasks as tasks
from run_helpers import list_processes, seconds_until
from tests.requirements import thorough

from shardscope.records.json_files import read_lines
from shardscope.runs.launch.launch import launch

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("bounded_time", "nothing_left")]

MAX_BYTES = 150 * 2**20


@thorough()
def test_fault_60_metrics_logged_faster_than_they_are_read(plan: Any, tmp_path: Path) -> None:
    run = launch(plan, tasks.floods, folder=tmp_path)
    events = [run.folder / "events" / f"rank-{rank}.jsonl" for rank in range(2)]
    seconds_until(lambda: all(path.exists() for path in events))
    supervisor = next(
        p for p in list_processes(tmp_path) if "shardscope.runs.launch.supervisor" in p.cmdline()
    )
    peak: list[int] = []
    watch = threading.Thread(target=_keep_peak, args=(supervisor, peak))
    watch.start()
    seconds_until(lambda: "TensorBoard gets a sample" in run.reason)
    assert run.status == "running" and "ctx.log once per step" in run.reason
    run.stop()
    assert seconds_until(lambda: run.status == "stopped", timeout=30) < 5
    supervisor.wait(100)  # It writes metrics.csv.
    watch.join()
    assert max(peak) < MAX_BYTES
    assert "TensorBoard gets a sample" in (run.folder / "supervisor.log").read_text()
    lines = read_lines(events[0])
    assert [line["step"] for line in lines] == list(range(len(lines))), "the file itself has every line"


def _keep_peak(process: psutil.Process, peak: list[int]) -> None:
    while process.is_running():
        try:
            peak.append(process.memory_info().rss)
            process.wait(0.1)
        except psutil.TimeoutExpired:
            continue
        except psutil.Error:
            return


def test_fault_61_a_secret_that_a_rank_sets_in_its_environment(plan: Any, tmp_path: Path) -> None:
    run = launch(plan, tasks.sets_a_secret, folder=tmp_path)
    assert run.wait(60) == "failed"
    seconds_until(lambda: not list_processes(tmp_path), timeout=20)
    secret = b"".join((b"fetched ", b"in mid run"))
    for file in run.folder.rglob("*"):
        assert not file.is_file() or secret not in file.read_bytes(), file
    assert "the token is ****" in run.logs(0) and "the token is ****" in run.logs(1)
    assert run.error is not None and "refused ****" in run.error
    assert any(name.startswith("loss/****") for line in run.metrics() for name in line)
