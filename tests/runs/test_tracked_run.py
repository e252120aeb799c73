"""Launched runs that report to wandb: the last step arrives, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from run_helpers import list_processes, make_plan, seconds_until
from tests.requirements import needs, thorough

needs("torch")

import shardscope as ss  # noqa: E402
from shardscope.records.folder import RunFolder  # noqa: E402
from shardscope.records.json_files import read_json  # noqa: E402

STAND_IN = """
import json, os
class Settings(dict):
    pass
class Run:
    def log(self, metrics, *, step):
        with open(os.environ["STAND_IN_FILE"], "a") as file:
            file.write(json.dumps({"step": step, "loss": metrics["loss"]}) + "\\n")
    def finish(self):
        with open(os.environ["STAND_IN_FILE"], "a") as file:
            file.write("{}\\n")
def init(**arguments):
    return Run()
"""

pytestmark = pytest.mark.usefixtures("bounded_time")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which a stand-in for wandb writes what it is called with."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("STAND_IN_FILE", str(tmp_path / "calls.jsonl"))
    return tmp_path / "calls.jsonl"


def read_calls(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@thorough()
def test_a_run_reports_all_of_its_steps(stand_in: Path, tmp_path: Path) -> None:
    run = ss.launch(make_plan(), ss.Pretrain(num_steps=6, report_to="wandb"), folder=tmp_path / "runs")
    assert run.wait(100) == "finished", run.error
    seconds_until(lambda: not list_processes(run.folder), 20)
    *calls, end = read_calls(stand_in)
    logged = {record["step"]: record["loss"] for record in run.metrics() if record["rank"] == 0}
    assert end == {} and {call["step"]: call["loss"] for call in calls} == logged
    assert sorted(logged) == list(range(6))
    # Only what was asked for.
    assert not any((run.folder / "tensorboard").iterdir())


@thorough()
def test_the_process_ends_with_a_killed_supervisor(stand_in: Path, tmp_path: Path) -> None:
    task = ss.Pretrain(num_steps=10_000, report_to="wandb")
    run = ss.launch(make_plan(), task, folder=tmp_path / "runs")
    seconds_until(lambda: len(read_calls(stand_in)) > 2, 60)
    os.kill((read_json(RunFolder(run.folder).supervisor) or {})["pid"], signal.SIGKILL)
    seconds_until(lambda: not list_processes(run.folder), 20)
    assert read_calls(stand_in)[-1] == {} and run.wait(20) == "lost"
