"""Reporting to trackio and wandb: with stand-ins for both packages, and with them where installed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from written_runs import PLAN, make_metrics, write_run

import shardscope as ss
from shardscope.machine.processes import list_descendants
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line, read_json, write_json
from shardscope.runs import trackers
from shardscope.runs.resume import _make_task
from shardscope.runs.task_fields import record_task_fields
from shardscope.runs.trackers import TrackerProcess, build_environment
from shardscope.runs.watch.periodic_checks import PeriodicChecks
from shardscope.training.tasks import text_task

STAND_IN = """
import json, os
def write(**record):
    with open(os.environ["STAND_IN_FILE"], "a") as file:
        file.write(json.dumps({"package": __name__, **record}) + "\\n")
class Settings(dict):
    pass
class Run:
    def log(self, metrics, *, step):
        write(metrics=metrics, step=step)
        if os.environ.get("STAND_IN_FAILS") == __name__:
            raise RuntimeError("the tracker is broken")
    def finish(self):
        write(finished=True)
def init(**arguments):
    modes = {name: os.environ.get(name) for name in ("WANDB_MODE", "HF_HUB_DISABLE_TELEMETRY")}
    write(init=arguments, modes=modes)
    return Run()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which stand-ins for wandb and trackio write what they are called with."""
    packages, file = tmp_path / "packages", tmp_path / "calls.jsonl"
    packages.mkdir()
    file.touch()
    for name in ("wandb", "trackio"):
        (packages / f"{name}.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), *filter(None, sys.path)]))
    monkeypatch.setenv("STAND_IN_FILE", str(file))
    for name in (*trackers.OFFLINE, "WANDB_PROJECT", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return file


def write_tracked_run(parent: Path, num_done: int = 3) -> RunFolder:
    folder = RunFolder(write_run("my-run", parent=parent, num_done=num_done))
    fields = {"seed": 1, "weights": "/home/me/secret-place/llama"}
    write_json(folder.run_json, read_json(folder.run_json) | {"asked": fields, "versions": {"torch": "2.13"}})
    return folder


def start_process(folder: RunFolder, *names: str) -> TrackerProcess:
    process = TrackerProcess(folder, names)
    with folder.supervisor_log.open("ab") as log:
        process.start(log)
    return process


def read_calls(file: Path, package: str = "wandb") -> list[dict[str, Any]]:
    calls = [json.loads(line) for line in file.read_text().splitlines()]
    return [call for call in calls if call["package"] == package]


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_metrics_are_reported_while_the_run_trains_and_to_its_end(stand_in: Path, tmp_path: Path) -> None:
    folder = write_tracked_run(tmp_path)
    process = start_process(folder, "tensorboard", "wandb")
    wait_for(lambda: len(read_calls(stand_in)) == 4)
    append_line(folder.events(0), make_metrics(3, 0, 1.0))
    append_line(folder.events(0), {"step": 3, "rank": 0, "validation_loss": float("nan"), "note": "text"})
    append_line(folder.events(1), make_metrics(99, 1, 1.0))
    process.finish()
    start, *calls, end = read_calls(stand_in)
    assert (start["init"]["project"], start["init"]["name"]) == ("shardscope", "my-run")
    assert start["init"]["dir"] == str(folder.path)
    # Offline, and without paths of this machine.
    assert start["modes"] == {"WANDB_MODE": "offline", "HF_HUB_DISABLE_TELEMETRY": "1"}
    config = start["init"]["config"]
    assert config["task"] == {"seed": 1, "weights": "llama"} and config["versions"] == {"torch": "2.13"}
    assert config["plan"] == json.loads(PLAN.to_json())
    assert [call["step"] for call in calls] == [0, 1, 2, 3, 3] and end["finished"]
    assert calls[0]["metrics"]["loss"] == make_metrics(0, 0, 0.0)["loss"]
    assert not {"step", "rank", "time"} & set(calls[0]["metrics"])
    assert [*calls[-1]["metrics"]] == ["validation_loss"]
    assert not read_calls(stand_in, "trackio") and folder.supervisor_log.read_text() == ""


def test_a_broken_tracker_does_not_stop_the_other(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAILS", "trackio")
    folder = write_tracked_run(tmp_path)
    start_process(folder, "wandb", "trackio").finish()
    assert [call.get("step") for call in read_calls(stand_in)] == [None, 0, 1, 2, None]
    assert [call.get("step") for call in read_calls(stand_in, "trackio")] == [None, 0]
    log = folder.supervisor_log.read_text()
    assert "gave up reporting to trackio" in log and "the tracker is broken" in log


def test_a_tracker_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.3)
    folder = write_tracked_run(tmp_path)
    (tmp_path / "wandb.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    process = start_process(folder, "wandb")
    assert process.pid in list_descendants()
    process.finish()
    assert process.pid not in list_descendants()


def test_no_process_is_started_for_tensorboard_alone(tmp_path: Path) -> None:
    process = start_process(write_tracked_run(tmp_path), "tensorboard")
    assert process.pid is None
    process.finish()


def test_the_users_own_settings_are_kept() -> None:
    assert build_environment({"WANDB_MODE": "online", "A": "b"}) == {
        **trackers.OFFLINE,
        "WANDB_MODE": "online",
        "A": "b",
    }


def test_a_tracker_with_its_children_is_not_killed_with_the_task() -> None:
    shell = "sleep 60 & echo started; wait"
    tracker, task = (
        subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, text=True) for _ in range(2)
    )
    try:
        assert [process.stdout.readline() for process in (tracker, task)] == ["started\n"] * 2
        kept = {*list_descendants()} - {*list_descendants(tracker.pid)}
        assert tracker.pid in kept and len(kept) == 2 and task.pid in list_descendants(tracker.pid)
    finally:
        for process in (tracker, task):
            for pid in {*list_descendants()} - {*list_descendants(process.pid)}:
                os.kill(pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("wandb", ("wandb",)),
        (["tensorboard", "trackio", "trackio"], ("tensorboard", "trackio")),
        ("none", ()),
        (["none"], ()),
        ((), ()),
    ],
)
def test_report_to_takes_names_as_transformers_does(value: Any, expected: tuple[str, ...]) -> None:
    assert ss.Pretrain(report_to=value).report_to == expected
    assert ss.Pretrain().report_to == ("tensorboard",)


def test_a_resumed_run_reports_to_the_same_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_task, "find_resumable", lambda field, value: value)
    asked = record_task_fields(ss.Pretrain(report_to=["trackio", "wandb"]))
    description = json.loads(json.dumps({"asked": asked}))
    assert _make_task(ss.Pretrain, description, tmp_path).report_to == ("trackio", "wandb")
    # Runs of older versions wrote TensorBoard's files.
    del description["asked"]["report_to"]
    assert _make_task(ss.Pretrain, description, tmp_path).report_to == ("tensorboard",)


@pytest.mark.parametrize("value", ["wandbb", ["tensorboard", "mlflow"], None, 3, ["none", "wandb"]])
def test_an_unknown_tracker_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"Pretrain\.report_to is .*tensorboard"):
        ss.Pretrain(report_to=value)


def test_a_missing_package_is_refused_before_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else find(name, *more)
    )
    task = ss.Pretrain(report_to=["wandb", "tensorboard"])
    with pytest.raises(ValueError, match=r"report_to is 'wandb'.*pip install wandb"):
        ss.launch(PLAN, task, folder=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("is_on", [True, False])
def test_tensorboard_files_are_only_written_where_asked(is_on: bool, tmp_path: Path) -> None:
    folder = write_tracked_run(tmp_path)
    PeriodicChecks(folder, 2, print, writes_tensorboard=is_on).check(1.0, is_running=False)
    assert any(folder.tensorboard.glob("rank-0/*")) == is_on


# ---- With the packages themselves, where they are installed


def find_package(name: str) -> pytest.MarkDecorator:
    is_installed = importlib.util.find_spec(name) is not None
    return pytest.mark.skipif(not is_installed, reason=f"needs {name}: pip install {name}")


@find_package("wandb")
def test_wandb_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    folder = write_tracked_run(tmp_path)
    start_process(folder, "wandb").finish()
    (file,) = (folder.path / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    for number in range(3):
        assert str(make_metrics(number, 0, 0.0)["loss"]).encode() in content
    assert b"my-run" in content and b"secret-place" not in content
    assert folder.supervisor_log.read_text() == ""


@find_package("trackio")
def test_trackio_writes_its_local_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    start_process(write_tracked_run(tmp_path), "trackio").finish()
    with sqlite3.connect(tmp_path / "trackio" / "shardscope.db") as database:
        rows = list(database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step"))
    assert [(name, step) for name, step, _ in rows] == [("my-run", 0), ("my-run", 1), ("my-run", 2)]
    assert json.loads(rows[1][2])["loss"] == make_metrics(1, 0, 0.0)["loss"]
