"""Stopping, from here, from elsewhere, and by the death of whoever held the run."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import run_tasks as tasks
from run_helpers import list_processes, make_plan, seconds_until
from tests.requirements import sample, thorough

import shardscope as ss
from shardscope.runs.launch.launch import launch
from shardscope.runs.launch.supervisor import Supervisor
from shardscope.runs.run import Run

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("bounded_time", "nothing_left")]


KERNEL = """
import os, sys, time
sys.path.insert(0, {tests!r})
import run_tasks
from run_helpers import make_plan
from shardscope.runs.launch.launch import launch
run = launch(make_plan(), run_tasks.{task}, name="run", folder={folder!r}, outlive_kernel={outlive})
print("launched", flush=True)
time.sleep(1000)
"""


def start_kernel(folder: Path, task: str, *, outlive: bool = False) -> subprocess.Popen[str]:
    code = KERNEL.format(tests=str(Path(__file__).parent), task=task, folder=str(folder), outlive=outlive)
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout is not None and kernel.stdout.readline() == "launched\n"
    return kernel


def find_supervisor(run: Run) -> int:
    return int(json.loads((run.folder / "supervisor.json").read_text())["pid"])


def rank_pid(run: Run, rank: int) -> int:
    return int(json.loads((run.folder / "ranks" / f"rank-{rank}.json").read_text())["pid"])


def has_begun(run: Run) -> bool:
    return {m["rank"] for m in run.metrics()} == {0, 1}


def test_fault_02_03_stop_mid_step_and_twice(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launch(plan, tasks.Log(10_000, 0.5), folder=tmp_path)
    seconds_until(lambda: has_begun(run))
    seconds_until(lambda: run.status == "running", 5)
    assert not run.reads_stop_requests, "this task never looks"
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/lessons/my first.ipynb")
    run.press("Stop")
    run.stop()
    assert seconds_until(lambda: run.status == "stopped", 5) < 5
    assert not [p for p in list_processes(tmp_path) if p.pid != find_supervisor(run)]
    assert run.reason == "Stop was pressed in my first.ipynb" and run.error is None
    run.stop()
    assert run.status == "stopped"


@sample(1)
@pytest.mark.parametrize("delay", [0.0, 0.3, 1.5])
def test_fault_01_stop_during_start_up(delay: float, plan: Any, tmp_path: Path) -> None:
    run = launch(plan, tasks.Log(10_000, 0.5), folder=tmp_path)
    time.sleep(delay)
    run.stop()
    assert run.wait(30) == "stopped", "the supervisor starts first"
    assert run.reason == "run.stop() was called"


def test_stop_with_checkpoint_ends_at_the_same_step_on_every_rank(plan: Any, tmp_path: Path) -> None:
    run = launch(plan, tasks.steps_until_stop, folder=tmp_path)
    seconds_until(lambda: len(run.metrics()) > 40)
    assert run.reads_stop_requests and not run.trains_the_plan
    with (run.folder / "control.jsonl").open("ab") as control:
        control.write(b"no json\n[1]\n\xff\xfe\n{}\n")
    run.send("profile", steps=3)
    run.stop(checkpoint=True)
    assert run.wait(10) == "stopped", run.error
    assert len({m["last_step"] for m in run.metrics() if "last_step" in m}) == 1
    assert [m["command"] for m in run.metrics() if "command" in m] == ["profile", "profile"]
    assert run.reason == "run.stop(checkpoint=True) was called: every rank returned from the task"
    assert [change["reason"] for change in run.history if change["status"] == "stopping"] == [
        "run.stop(checkpoint=True) was called: the ranks end when their task reads ctx.should_stop"
    ]
    assert "malformed" in (run.folder / "supervisor.log").read_text()


@thorough()
def test_stop_with_checkpoint_raises_for_a_script(tmp_path: Path) -> None:
    """Refused at once, not after the ten minutes that a checkpoint may take; a plain stop works."""
    run = launch(make_plan(1), ss.Script(tasks.own_loop), folder=tmp_path)
    # The supervisor may see the rank at work some moments after the rank's first words.
    seconds_until(lambda: "my own loop" in run.logs(0) and run.status == "running")
    with pytest.raises(
        ValueError, match=r"run\.stop checkpoint is True.* Script .*Nearest fix: run\.stop\(\)"
    ):
        run.stop(checkpoint=True)
    run.send("stop", checkpoint=True)  # As something else that writes to the folder would.
    seconds_until(
        lambda: "ignored a stop with a checkpoint" in (run.folder / "supervisor.log").read_text(), 5
    )
    assert run.status == "running"
    run.stop()
    assert run.wait(5) == "stopped"


@thorough()
def test_fault_07_another_process_attaches_and_stops(plan: Any, tmp_path: Path) -> None:
    run = launch(plan, tasks.Log(10_000, 0.2), folder=tmp_path)
    code = f"""
from shardscope.runs.run import Run
run = Run.attach({str(run.folder)!r})
while not run.metrics(): run.wait(0.05)
run.stop()
print(run.wait(10))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "stopped", done.stderr
    assert run.status == "stopped"


@thorough()
@pytest.mark.parametrize("last_line", ["", "run.wait(60)"])
def test_a_script_that_ends_before_its_run_names_it(tmp_path: Path, last_line: str) -> None:
    code = f"""
import os, sys
sys.path += {sys.path!r}
import run_tasks as tasks
from run_helpers import make_plan
import shardscope as ss
run = ss.launch(make_plan(1), tasks.Log(20, 0.05), folder={str(tmp_path)!r}, name="short")
# A forked process, whose end stops no run, names none.
child = os.fork()
if child == 0:
    sys.exit()
os.waitpid(child, 0)
{last_line}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=90
    )
    assert done.stderr.count("stops run 'short'") == (not last_line), done.stderr


def test_fault_08_kernel_killed(tmp_path: Path) -> None:
    kernel = start_kernel(tmp_path, "Log(10_000, 0.2)")
    run = Run.attach(tmp_path)
    seconds_until(lambda: has_begun(run))
    kernel.kill()
    kernel.wait()
    assert run.wait(5) == "stopped" and run.reason == "the kernel that launched it ended"
    assert not [p for p in list_processes(tmp_path) if p.pid != find_supervisor(run)]


def test_fault_07_a_run_that_outlives_its_kernel(tmp_path: Path) -> None:
    kernel = start_kernel(tmp_path, "Log(10_000, 0.2)", outlive=True)
    run = Run.attach(tmp_path)
    seconds_until(lambda: has_begun(run))
    kernel.kill()
    kernel.wait()
    count = len(run.metrics())
    seconds_until(lambda: len(run.metrics()) > count + 6, 10)
    assert run.status == "running"
    run.stop()
    assert run.wait(5) == "stopped"


@sample(1)
@pytest.mark.parametrize("who", ["supervisor", "launcher"])
def test_fault_09_supervisor_or_launcher_killed(who: str, plan: Any, tmp_path: Path) -> None:
    run = launch(plan, tasks.deaf, folder=tmp_path)
    seconds_until(lambda: has_begun(run))
    supervisor = find_supervisor(run)
    if who == "supervisor":
        os.kill(supervisor, signal.SIGKILL)
        assert run.wait(5) == "lost" and "supervisor" in run.reason
    else:
        launchers = [p for p in list_processes(tmp_path) if p.ppid() == supervisor]
        launchers[0].kill()
        assert run.wait(5) == "failed" and "the launcher was killed by SIGKILL: " in run.reason
        assert run.error is not None and "logs/launcher.log in the run folder" in run.error
    assert seconds_until(lambda: not list_processes(tmp_path), 5) < 5
    run.stop()


@thorough()
def test_a_terminated_supervisor_stops_its_run(plan: Any, tmp_path: Path) -> None:
    run = launch(plan, tasks.Log(10_000, 0.2), folder=tmp_path)
    seconds_until(lambda: has_begun(run))
    os.kill(find_supervisor(run), signal.SIGTERM)
    assert run.wait(5) == "stopped" and "SIGTERM" in run.reason


def test_fault_23_a_supervisor_whose_log_is_full_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    Supervisor.log("could not write status 'running': [Errno 28] No space left on device")


@sample(1)
@pytest.mark.parametrize("task", [tasks.deaf, tasks.frozen])
def test_fault_04_05_ranks_that_ignore_signals(task: Any, plan: Any, tmp_path: Path) -> None:
    run = launch(plan, task, folder=tmp_path)
    seconds_until(lambda: has_begun(run))
    run.stop()
    assert seconds_until(lambda: run.status == "stopped", 5) < 3.5
    assert not [p for p in list_processes(tmp_path) if p.pid != find_supervisor(run)]
    assert run.error is None


@thorough()
def test_processes_that_ranks_started_end_with_the_run(tmp_path: Path) -> None:
    run = launch(make_plan(1), tasks.with_children, folder=tmp_path)
    seconds_until(run.metrics)
    run.stop()
    assert run.wait(5) == "stopped"
    assert seconds_until(lambda: not list_processes(tmp_path), 1) < 1


def test_fault_24_the_run_folder_is_moved(plan: Any, tmp_path: Path) -> None:
    run = launch(plan, tasks.steps_until_stop, folder=tmp_path)
    seconds_until(run.metrics)
    moved = run.folder.rename(tmp_path / "elsewhere")
    assert seconds_until(lambda: not list_processes(tmp_path), 15) < 15
    assert run.status == "lost" and run.reason == "its folder is gone"
    again = Run.attach(moved)
    assert again.status == "stopped" and str(moved) in again.reason
    assert not (moved / "task.pkl").exists() and not (moved / "tmp").exists()


@thorough()
def test_fault_24_another_folder_is_at_the_path_of_a_moved_run(plan: Any, tmp_path: Path) -> None:
    run = launch(plan, tasks.steps_until_stop, folder=tmp_path, name="a")
    seconds_until(run.metrics)
    moved = run.folder.rename(tmp_path / "old")
    run.folder.mkdir()
    again = Run.attach(moved)
    assert again.wait(15) == "stopped" and str(moved) in again.reason
    assert seconds_until(lambda: not list_processes(tmp_path), 5) < 5
    assert not list(run.folder.iterdir())
    assert not (moved / "task.pkl").exists() and not (moved / "tmp").exists()


@thorough()
def test_fault_24_a_run_is_launched_at_the_path_of_a_moved_one(plan: Any, tmp_path: Path) -> None:
    """Neither run sees the commands, or writes the records, of the other."""
    run = launch(plan, tasks.steps_until_stop, folder=tmp_path, name="a")
    seconds_until(run.metrics)
    moved = Run.attach(run.folder.rename(tmp_path / "old"))
    new = launch(plan, tasks.steps_until_stop, folder=tmp_path, name="a")
    assert new.folder == run.folder
    assert moved.wait(15) == "stopped" and str(moved.folder) in moved.reason
    seconds_until(lambda: new.status == "running" and len(new.metrics()) > 40)
    assert (new.folder / "tmp").exists() and not (new.folder / "exits.jsonl").exists()
    assert [change["status"] for change in new.history] == ["starting", "running"]
    new.stop(checkpoint=True)
    assert new.wait(10) == "stopped" and new.reason.startswith("run.stop(checkpoint=True) was called")


@thorough()
def test_fault_24_the_run_folder_is_deleted(plan: Any, tmp_path: Path) -> None:
    run = launch(plan, tasks.deletes_its_folder, folder=tmp_path)
    assert run.wait(30) == "lost" and run.reason == "its folder is gone"
    assert run.metrics() is not None and run.logs(0) == ""
    run.stop()
    assert seconds_until(lambda: not list_processes(tmp_path), 8) < 8
