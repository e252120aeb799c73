"""A soak of a few launches, and that the soak sees what a launch might leave. `make soak` runs 200."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from run_helpers import seconds_until
from tests.requirements import thorough
from tests.soak import residue
from tests.soak.choices import Choice, draw_choices
from tests.soak.faults import FAULTS
from tests.soak.report import format_report
from tests.soak.residue import MARK, Before, find_residue_in_folder
from tests.soak.runner import Outcome

from shardscope.machine.processes import read_start_time
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import partial_file
from shardscope.runs.launch import lease

ROOT = Path(__file__).parents[2]
FEW = (
    "kill -9 of the supervisor, ranks left processes",
    "kill -9 of the kernel, outlived",
    "the port taken",
    "stop twice at once",
)
"""Of kinds of faults that other tests here have in other forms."""


@thorough()
@pytest.mark.alone
def test_a_short_soak_leaves_nothing(tmp_path: Path) -> None:
    """The soak has its own process, because it adopts orphans."""
    command = [sys.executable, "-m", "tests.soak", "--launches", str(len(FEW)), "--seed", "7"]
    done = subprocess.run(
        [*command, "--faults", *FEW, "--report", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = (tmp_path / "report.md").read_text()
    assert "left behind: nothing" in written and written in done.stdout
    assert all(f"| {name} | 1 |" in written for name in FEW)


def record_environment(tmp_path: Path) -> Before:
    """Record the environment, in a test's body: pytest writes to the environment at its beginning."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return Before("test/1", scratch)


def describe_residue(before: Before, *ports: int) -> str:
    return "; ".join(before.find_residue((), (), ports, patience=0.1))


@pytest.fixture
def earlier_process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait()


def test_residual_processes_are_found_by_mark_session_and_parent(
    earlier_process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    before = record_environment(tmp_path)
    # The process has its own session and an environment with nothing but the mark.
    with subprocess.Popen(["sleep", "100"], env={MARK: before.mark}, start_new_session=True) as marked:
        try:
            seconds_until(lambda: psutil.Process(marked.pid).name() == "sleep", 5)
            told = describe_residue(before)
            assert f"a process: {marked.pid} (sleeping" in told and str(earlier_process.pid) not in told
            other_mark = Before("another", before.scratch)
            assert marked.pid not in {process.pid for process in other_mark.find_processes((), ())}
            assert marked.pid in {process.pid for process in other_mark.find_processes((marked.pid,), ())}
        finally:
            marked.kill()
        # What the product has to reap and did not is left as well; other dead orphans are buried.
        seconds_until(lambda: psutil.Process(marked.pid).status() == psutil.STATUS_ZOMBIE, 5)
        assert [process.pid for process in before.find_processes((), (marked.pid,))] == [marked.pid]
        assert before.find_processes((), ()) == []


def test_every_other_residue_is_reported(tmp_path: Path) -> None:
    before = record_environment(tmp_path)
    assert describe_residue(before) == ""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-over")
    thread.start()
    with socket.socket() as listening, (tmp_path / "open").open("w"):
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        (before.scratch / "rest").touch()
        os.environ["LEFT"] = "1"
        port = listening.getsockname()[1]
        told = describe_residue(before, port)
    for words in (
        "a thread: left-over",
        f"port {port} is taken",
        "a temporary file: rest",
        "environment: LEFT",
    ):
        assert words in told
    assert "open files: " in told and str(tmp_path / "open") in told
    stop.set()
    thread.join()
    del os.environ["LEFT"]
    (before.scratch / "rest").unlink()
    assert describe_residue(before, port) == ""


@pytest.mark.skipif(not residue.SHARED_MEMORY.is_dir(), reason="needs /dev/shm: run it on Linux")
def test_shared_memory_is_residue_once_no_process_uses_it(tmp_path: Path) -> None:
    before = record_environment(tmp_path)
    with tempfile.NamedTemporaryFile(dir=residue.SHARED_MEMORY, delete=False) as file:
        assert "shared memory" not in describe_residue(before)
    assert f"shared memory: {file.name}" in describe_residue(before)
    Path(file.name).unlink()


def test_task_temporary_files_and_secrets_in_a_run_folder_are_reported(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create("tmp")
    folder.temporary.rmdir()
    assert find_residue_in_folder(folder.path) == []
    for path in (folder.task, folder.rank(0).with_name(".rank-0.json.7")):
        path.touch()
    folder.log(0).write_text("the key is s3cr3t")
    assert find_residue_in_folder(folder.path, secret=b"s3cr3t") == [
        "in the run folder: logs/rank-0.log",
        "in the run folder: ranks/.rank-0.json.7",
        "in the run folder: task.pkl",
    ]


def test_fault_09_the_launching_process_cleans_up_after_a_killed_supervisor(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create("tmp")
    folder.task.touch()
    (folder.temporary / "torchelastic").mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    partial_file(folder.error(0)).with_suffix(f".{gone.pid}").touch()
    being_written = partial_file(folder.path / "note.json")
    being_written.touch()
    folder.log(0).write_text("my token is hf_" + "a1B2" * 8)
    code = "import subprocess; print(subprocess.Popen(['sleep', '100']).pid, flush=True); input()"
    command = [sys.executable, "-c", code]
    supervisor = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert supervisor.stdout is not None and supervisor.stdin is not None
    child = int(supervisor.stdout.readline())
    read_end, write_end = lease.open_lease()
    lease.hold_lease(supervisor, write_end, folder)
    time.sleep(0.05)
    assert folder.task.exists() and read_start_time(child) is not None
    supervisor.kill()
    kept = [f"in the run folder: {being_written.name}"]
    seconds_until(lambda: find_residue_in_folder(folder.path) == kept and read_start_time(child) is None, 5)
    assert os.read(read_end, 1) == b""
    seconds_until(lambda: folder.log(0).read_text() == "my token is " + "*" * 35, 5)
    os.close(read_end)
    supervisor.stdin.close()
    supervisor.stdout.close()


def test_a_seed_gives_the_same_soak_with_every_fault() -> None:
    first, again, other = ([c.fault.name for c in draw_choices(seed, 60)] for seed in (0, 0, 1))
    assert first == again != other
    assert set(first[: len(FAULTS)]) == {fault.name for fault in FAULTS}
    drawn = [choice.build_task()[2] for choice in draw_choices(0, 60)]
    assert drawn == [choice.build_task()[2] for choice in draw_choices(0, 60)]
    assert {words.split()[0] for words in drawn} >= {"Pretrain", "steps", "collective", "Fails"}


def test_failures_are_in_the_soak_report() -> None:
    choice = Choice(seed=3, number=1, fault=FAULTS[0])
    outcome = Outcome(choice=choice, task="steps", ended="lost: its", seconds=1.25, wrong=("a process: 7",))
    text = format_report([outcome], seed=3, seconds=60)
    assert "1 left something or said something wrong" in text
    assert "| none | 1 | lost 1; **1 wrong** | 1.2+ | 1.2+ |" in text and "- 1 (none): a process: 7" in text
