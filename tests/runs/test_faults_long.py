"""Faults that take long, or most of a machine: `make test-faults` runs them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import run_tasks as tasks
from tests.faults import slow_test

from shardscope.records.folder import RunFolder
from shardscope.runs.launch.launch import launch

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("bounded_time", "nothing_left")]

SMALL_DISK = """
import sys
sys.path.insert(0, {tests!r})
import run_tasks
from pathlib import Path
from run_helpers import make_plan
from shardscope.runs.launch.launch import launch

folder = Path({folder!r})
run = launch(make_plan(), run_tasks.fills_its_disk, name="full", folder=folder)
status = run.wait(90)
print("was", status, "|", run.reason)
print("lines", len(run.metrics()))
print("said", "were not written" in run.logs(0) + run.logs(1))
run_tasks.fill(folder / "filler")
try:
    launch(make_plan(1), run_tasks.Log(), folder=folder)
    print("launched")
except OSError as error:
    print("refused:", error)
"""

NO_ROOM = """
import sys
sys.path.insert(0, {tests!r})
import run_tasks
from pathlib import Path
from run_helpers import make_plan
from shardscope.runs.launch.launch import launch

folder = Path({folder!r})
for num_ranks in (1, 2):
    for task in (run_tasks.leaves_no_room, run_tasks.raises_without_room):
        run = launch(make_plan(num_ranks), task, name="no-room", folder=folder)
        print(num_ranks, task.__name__, run.wait(60), "|", run.reason, flush=True)
        (folder / "filler").unlink()
"""

ON_A_FULL_DISK = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
import run_tasks
from pathlib import Path
from run_helpers import make_plan
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import read_json
from shardscope.runs.launch.launch import launch

folder = Path({folder!r})
run = launch(make_plan(), run_tasks.reads_stop_and_commands, name="full", folder=folder)
while not run.metrics():
    time.sleep(0.1)
run_tasks.fill(folder / "filler")
END
print(run.wait(60), "|", run.reason)
"""
STOPPED = ON_A_FULL_DISK.replace("END", "run.stop()")
KILLED = ON_A_FULL_DISK.replace(
    "END", 'os.kill(read_json(RunFolder(run.folder).rank(1))["pid"], signal.SIGKILL)'
)


@slow_test
def test_fault_22_a_hundred_megabytes_without_a_newline(plan: Any, tmp_path: Path) -> None:
    run = launch(plan, tasks.Prints(100_000_000), folder=tmp_path)
    assert run.wait(120) == "finished", run.error
    assert RunFolder(run.folder).log(0).stat().st_size > 100_000_000
    text = run.logs(0)
    assert len(text) <= 64 * 1024 and "red the end" in text and "\x1b" not in text


def on_a_small_disk(program: str, tmp_path: Path) -> str:
    """Launch from a kernel into a disk of 4 MB of its own; return the kernel's output."""
    folder = tmp_path / "disk"
    folder.mkdir()
    script = tmp_path / "kernel.py"
    script.write_text(program.format(tests=str(Path(__file__).parent), folder=str(folder)))
    mount = f"mount -t tmpfs -o size=4m tmpfs {folder} && exec {sys.executable} {script}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount], capture_output=True, text=True, check=False, timeout=170
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"needs a mount of its own, run it where that is allowed: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


asks_unshare = pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare: install util-linux")


@slow_test
@asks_unshare
def test_fault_23_a_disk_that_fills_up_during_a_run(tmp_path: Path) -> None:
    said = on_a_small_disk(SMALL_DISK, tmp_path)
    assert "was finished | the task returned on every rank" in said, said
    assert "said True" in said
    assert "refused: [Errno 28] The run folder" in said and "No space left" in said


@slow_test
@asks_unshare
def test_fault_23_a_full_disk_neither_causes_nor_hides_a_failure(tmp_path: Path) -> None:
    told = on_a_small_disk(NO_ROOM, tmp_path).splitlines()
    ends = {(line.split()[0], line.split()[1]): line.split(maxsplit=2)[2] for line in told}
    for ranks in ("1", "2"):
        assert ends[ranks, "leaves_no_room"] == "finished | the task returned on every rank"
        failed = ends[ranks, "raises_without_room"]
        assert failed.startswith("failed | ")
        assert "the disk of the run folder is full" in failed or "nobody reads this" in failed


@slow_test
@asks_unshare
def test_fault_23_a_run_on_a_full_disk_is_stopped(tmp_path: Path) -> None:
    """The command could not be written: run.stop() raised, and the run went on."""
    assert on_a_small_disk(STOPPED, tmp_path).startswith("stopped | run.stop() was called")


@slow_test
@asks_unshare
def test_fault_23_a_rank_that_is_killed_on_a_full_disk(tmp_path: Path) -> None:
    """Its exit code was lost, and the reason was the error of the rank that lost it."""
    assert on_a_small_disk(KILLED, tmp_path).startswith("failed | rank 1 was killed by SIGKILL")
