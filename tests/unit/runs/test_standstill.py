"""A task that logs no steps is called still where nothing of it moves, and not where anything does."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.requirements import sample

from shardscope.machine.processes import read_start_time
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import write_json
from shardscope.runs.watch.hang import BUSY_FACTOR
from shardscope.runs.watch.stack_requests import NO_REPLY, NO_SPACE
from shardscope.runs.watch.standstill import NUM_SAMPLES, Activity, StandstillDetector

RANK = """
import sys, threading, time
from pathlib import Path
from shardscope.runs.watch.stacks import install_stack_handler
install_stack_handler(Path(sys.argv[1]))
go_on = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), go_on.set()), daemon=True).start()
def wait():
    go_on.wait()
    elsewhere()
def save_checkpoint():
    wait()
module = {"time": time}
source = "def backward(): time.sleep(1000)"
exec(compile(source, "/lib/torch/autograd/graph.py", "exec"), module)
backward = module["backward"]
def elsewhere(): time.sleep(100)
print("ready", flush=True)
globals()[sys.argv[2]]()
"""


@pytest.fixture
def rank(folder: RunFolder, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """One that waits in the function that a test names, and goes elsewhere at a line."""
    where = getattr(request, "param", "wait")
    command = [sys.executable, "-c", RANK, str(folder.stacks(0)), where]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    write_json(folder.rank(0), {"pid": process.pid, "started": read_start_time(process.pid)})
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def wait(watch: StandstillDetector, seconds: int, new: Any = (), *, has_steps: bool = False) -> list[str]:
    """Return the reports of some looks, one second apart by the fake clock."""
    results = []
    for _ in range(seconds):
        size = _count_answers(watch)
        results.append(watch.check(dict(new), 1.0, has_steps=has_steps))
        deadline = time.monotonic() + 5
        while (
            watch._seconds_since_request == 0.0
            and _count_answers(watch) == size
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
    return [words for words in results if words]


def _count_answers(watch: StandstillDetector) -> int:
    """Count the recorded stacks; those of this file's ranks end in the module."""
    path = watch.folder.stacks(0)
    return path.read_bytes().count(b" in <module>\n") if path.exists() else 0


def test_fault_05_a_standstill_is_reported_once_and_cleared(
    folder: RunFolder, rank: subprocess.Popen[str]
) -> None:
    watch = StandstillDetector(folder, 1, quiet_seconds=60)
    assert wait(watch, 60) == []
    (words,) = wait(watch, 100)
    assert words.startswith("no activity for 60 s: ") and "rank 0: " in words
    assert "called from wait (<string>:" in words and words.endswith("in its log")
    assert "no activity for 60 s" in folder.log(0).read_text()
    assert watch.hangs
    with folder.log(0).open("a") as log:
        log.write("here I am\n")
    assert wait(watch, 2) == ["activity is seen again"] and not watch.hangs


def test_stacks_of_an_ended_rank_are_not_requested(folder: RunFolder, rank: subprocess.Popen[str]) -> None:
    write_json(folder.rank(1), {"pid": rank.pid, "started": 1.0, "exit": "finished"})
    (words,) = wait(StandstillDetector(folder, 2, quiet_seconds=60), 100)
    assert "; rank 1 has returned from the task; rank 0: " in words and "rank 1: " not in words


@pytest.mark.parametrize("rank", ["backward"], indirect=True)
def test_a_standstill_after_a_rank_has_returned_is_reported_sooner(
    folder: RunFolder, rank: subprocess.Popen[str]
) -> None:
    watch = StandstillDetector(folder, 2, quiet_seconds=600)
    assert wait(watch, 100) == []
    write_json(folder.rank(1), {"pid": rank.pid, "started": 1.0, "exit": "finished"})
    (words,) = wait(watch, 90)
    assert "; rank 1 has returned from the task; rank 0: " in words


def test_a_last_rank_that_waits_for_something_else_is_not_reported_sooner(
    folder: RunFolder, rank: subprocess.Popen[str]
) -> None:
    """Rank 0 waits for a server's answer, say, after the others have returned."""
    watch = StandstillDetector(folder, 2, quiet_seconds=600)
    write_json(folder.rank(1), {"pid": rank.pid, "started": 1.0, "exit": "finished"})
    assert wait(watch, 590) == []
    (words,) = wait(watch, 90)
    assert words.startswith("no activity for 6")


def test_a_changed_stack_is_activity(folder: RunFolder, rank: subprocess.Popen[str]) -> None:
    watch = StandstillDetector(folder, 1, quiet_seconds=60)
    assert wait(watch, 50) == []
    assert rank.stdin is not None
    rank.stdin.write("\n")
    rank.stdin.flush()
    time.sleep(0.2)
    assert wait(watch, 55) == []
    (words,) = wait(watch, 100)
    assert "elsewhere (<string>:" in words


@pytest.mark.parametrize("rank", ["save_checkpoint"], indirect=True)
def test_a_delay_reason_on_the_stack_extends_the_limit(
    folder: RunFolder, rank: subprocess.Popen[str]
) -> None:
    watch = StandstillDetector(folder, 1, quiet_seconds=30)
    assert wait(watch, int(30 * BUSY_FACTOR) - 1) == []
    assert len(wait(watch, 40)) == 1


@sample(1)
@pytest.mark.parametrize(
    "sign", [Activity(0.5, 0, 0), Activity(0.0, 2**20, 0), Activity(0.0, 0, 1)], ids=["cpu", "files", "log"]
)
def test_output_cpu_time_and_file_access_are_activity(
    sign: Activity, folder: RunFolder, rank: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = StandstillDetector(folder, 1, quiet_seconds=60)
    now = [Activity(7.0, 0, 0)]

    def read_activity() -> dict[int, Activity]:
        now.append(Activity(*(a + b for a, b in zip(now[-1], sign, strict=True))))
        return {0: now[-1]}

    monkeypatch.setattr(watch, "_read_activity", read_activity)
    assert wait(watch, 300) == [] and not folder.log(0).exists()
    monkeypatch.undo()
    assert len(wait(watch, 100)) == 1


def test_with_logged_steps_the_step_based_detector_is_responsible(
    folder: RunFolder, rank: subprocess.Popen[str]
) -> None:
    watch = StandstillDetector(folder, 1, quiet_seconds=60)
    assert wait(watch, 300, has_steps=True) == []
    assert wait(watch, 300, {0: [{"loss": 1.0}]}) == []
    assert len(wait(watch, 100)) == 1


def test_activity_of_child_processes_counts_as_the_ranks(
    folder: RunFolder, rank: subprocess.Popen[str]
) -> None:
    watch = StandstillDetector(folder, 1, quiet_seconds=60)
    idle = watch._read_activity()[0]
    assert idle.cpu_seconds > 0 and idle.file_bytes > 0 and idle.printed_bytes == 0
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'while True: pass']);"
        "print(p.pid, flush=True); p.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            write_json(folder.rank(0), {"pid": parent.pid, "started": read_start_time(parent.pid)})
            before = watch._read_activity()[0].cpu_seconds
            # On a busy machine the child gets little of a core at first.
            deadline = time.monotonic() + 10
            while watch._read_activity()[0].cpu_seconds <= before + 0.1 and time.monotonic() < deadline:
                time.sleep(0.1)
            assert watch._read_activity()[0].cpu_seconds > before + 0.1
        finally:
            subprocess.run(["kill", str(child)], check=True)
    assert watch._read_activity() == {}


STACK = """Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line {other} in run

Current thread 0x00007f2 (most recent call first):
  File "/home/me/task.py", line 7 in wait
"""


def build_watch(
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    *,
    cpu_seconds: float = 0.0,
    replies: tuple[str, str] = (STACK, STACK),
) -> StandstillDetector:
    """Return the detector of one rank that uses ``cpu_seconds`` per second, and answers with ``replies``."""
    watch = StandstillDetector(folder, 1, quiet_seconds=600)
    clock, answers = [0.0], list(replies)

    def read_activity() -> dict[int, Activity]:
        clock[0] += watch.quiet_seconds / NUM_SAMPLES
        return {0: Activity(cpu_seconds * clock[0], 0, watch._count_printed(0))}

    monkeypatch.setattr(watch, "_read_activity", read_activity)
    monkeypatch.setattr(watch._stacks, "send", lambda: None)
    monkeypatch.setattr(watch._stacks, "read_replies", lambda: {0: answers.pop(0) if answers else NO_REPLY})
    return watch


def check_for(watch: StandstillDetector, seconds: int) -> list[str]:
    results = [watch.check({}, 1.0, has_steps=False) for _ in range(seconds)]
    return [words for words in results if words]


@pytest.mark.parametrize(("cpu_seconds", "hangs"), [(0.0, True), (0.01, True), (0.03, False)])
def test_threads_that_wait_may_use_two_percent_of_a_core(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, cpu_seconds: float, hangs: bool
) -> None:
    watch = build_watch(folder, monkeypatch, cpu_seconds=cpu_seconds)
    assert check_for(watch, 595) == []
    assert len(check_for(watch, 100)) == hangs and watch.hangs == hangs


@pytest.mark.parametrize(
    ("replies", "hangs"),
    [
        ((STACK.replace("{other}", "8"), STACK.replace("{other}", "9")), True),
        ((STACK, STACK.replace("line 7", "line 8")), False),
        ((NO_REPLY, NO_REPLY), False),
        ((NO_SPACE, NO_SPACE), False),
    ],
    ids=["another thread", "main thread", "no reply", "no space"],
)
def test_only_a_known_and_unchanged_main_thread_stands_still(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, replies: tuple[str, str], hangs: bool
) -> None:
    watch = build_watch(folder, monkeypatch, replies=replies)
    assert len(check_for(watch, 700)) == hangs and watch.hangs == hangs


def test_a_suspended_machine_and_a_run_without_ranks_do_not_stand_still(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = StandstillDetector(folder, 1, quiet_seconds=60)
    assert check_for(watch, 300) == [] and not watch.hangs, "no rank has started"
    watch = build_watch(folder, monkeypatch)
    assert check_for(watch, 300) == []
    assert watch.check({}, 3600.0, has_steps=False) is None
    assert check_for(watch, 280) == []
    assert len(check_for(watch, 100)) == 1
