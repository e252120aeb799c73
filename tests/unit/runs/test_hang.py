"""A hang is found from what ranks log, explained by their stacks, and not seen where there is none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope.machine import processes
from shardscope.machine.processes import read_start_time
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import partial_file, read_json, read_lines, write_json
from shardscope.runs.launch.supervision import run_end
from shardscope.runs.launch.supervision.supervisor_process import ReceivedSignals
from shardscope.runs.launch.supervisor import Supervisor
from shardscope.runs.watch import periodic_checks
from shardscope.runs.watch.hang import BUSY_FACTOR, HangDetector
from shardscope.runs.watch.hang_reports import build_report, describe_hang, parse_report
from shardscope.runs.watch.periodic_checks import PeriodicChecks
from shardscope.runs.watch.stack_requests import STOPPED
from shardscope.runs.watch.stacks import (
    BUSY_WITH,
    ENGINE_FOLDERS,
    describe_position,
    find_delay_reason,
    parse_main_thread,
    read_process_state,
)
from shardscope.runs.watch.standstill import StandstillDetector

TOOLKIT = Path(ss.__file__).parent

RANK = """
import sys, time
from pathlib import Path
from shardscope.runs.watch.stacks import install_stack_handler
install_stack_handler(Path(sys.argv[1]))
def save_checkpoint(): wait()
def wait():
    print("ready", flush=True)
    time.sleep(100)
globals()[sys.argv[2]]()
"""


@pytest.fixture
def ranks(folder: RunFolder, request: pytest.FixtureRequest) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that answer as ranks do, in the functions that a test names."""
    started = []
    for rank, where in enumerate(getattr(request, "param", ("wait", "wait"))):
        command = [sys.executable, "-c", RANK, str(folder.stacks(rank)), where]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        write_json(folder.rank(rank), {"pid": process.pid, "started": read_start_time(process.pid)})
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield started
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def make_steps(first: int, count: int, seconds: float = 0.1) -> list[dict[str, Any]]:
    return [{"step": step, "time": 1000 + step * seconds} for step in range(first, first + count)]


def wait(watch: HangDetector, seconds: float) -> list[str]:
    """Return the reports while nothing is logged for ``seconds``; processes answer within each look."""
    results = []
    for _ in range(int(seconds)):
        deadline = time.monotonic() + 5
        while (
            watch._seconds_since_request is not None
            and not has_answered(watch)
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        results.append(watch.check({}, 1.0))
    return [words for words in results if words]


def has_answered(watch: HangDetector) -> bool:
    """Return whether every process that can answer has; the last line of its stack is in this file."""
    pids = {rank: (read_json(watch.folder.rank(rank)) or {})["pid"] for rank in watch._stacks.marks}
    return all(
        read_process_state(pid) in ("", "T", "Z")
        or b" in <module>\n" in watch.folder.stacks(rank).read_bytes()[watch._stacks.marks[rank] :]
        for rank, pid in pids.items()
    )


def test_fault_05_a_hang_is_reported_once_and_cleared(folder: RunFolder, ranks: list[Any]) -> None:
    watch = HangDetector(folder, 2, least_seconds=10)
    assert watch.check({0: make_steps(0, 11), 1: make_steps(0, 10)}, 1.0) is None
    assert wait(watch, 10) == []
    (words,) = wait(watch, 50)
    facts = ("no step for 12 s", "0.1 s", "rank 1 is 1 step behind")
    assert all(fact in words for fact in facts)
    assert "rank 1: wait (<string>:" in words and words.endswith("in its log")
    log = folder.log(0).read_text()
    assert "no step for 12 s" in log and log.count(" in wait\n") == 1
    assert watch.check({0: make_steps(11, 1)}, 1.0) is None and watch.hangs
    assert watch.check({0: make_steps(12, 1), 1: make_steps(10, 3)}, 1.0) == "steps are logged again"
    assert watch.check({0: make_steps(13, 1), 1: make_steps(13, 1)}, 1.0) is None


def test_a_stop_with_a_checkpoint_reports_a_hang(folder: RunFolder) -> None:
    supervisor, now = Supervisor(folder, None, ReceivedSignals()), time.monotonic()
    supervisor.ranks_are_up = True
    supervisor.stop.begin("run.stop(checkpoint=True) was called", checkpoint=True)
    assert supervisor.stop.deadline > now + 599
    for hangs, words, least in ((True, "no step for 61 s", 120), (False, "steps are logged again", 599)):
        supervisor.checks._hang.hangs = hangs
        supervisor.checks._hang.check = lambda *_, words=words: words  # type: ignore[method-assign]
        supervisor._run_checks(now + 1)
        assert supervisor.stop.phase == "checkpoint"
        assert now + least - 1 < supervisor.stop.deadline < now + least + 10
        assert read_lines(folder.status)[-1]["reason"].endswith(words)


def test_fault_23_a_hang_is_reported_and_cleared_without_writable_logs(folder: RunFolder) -> None:
    folder.log(0).mkdir()
    watch = HangDetector(folder, 1, least_seconds=2)
    watch.check({0: make_steps(0, 10)}, 1.0)
    (words,) = wait(watch, 8)
    assert words.startswith("no step for ") and watch.hangs
    assert watch.check({0: make_steps(10, 1)}, 1.0) == "steps are logged again"


def test_fault_23_lost_metrics_on_a_full_disk_are_no_hang(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that trained on was reported to hang, and its ranks not to answer."""
    watch = HangDetector(folder, 1, least_seconds=2)
    watch.check({0: make_steps(0, 10)}, 1.0)
    with monkeypatch.context() as full:
        full.setattr(RunFolder, "is_on_full_disk", True)
        (words,) = wait(watch, 8)
    assert "the disk of " in words and "is full" in words and not watch.hangs
    assert watch.check({0: make_steps(10, 1)}, 1.0) == "steps are logged again"


def touch_metrics(folder: RunFolder, watch: HangDetector, seconds: int) -> list[str]:
    """Return the reports while rank 0 loses a record a second, whose time it sets."""
    results = []
    for second in range(seconds):
        os.utime(folder.events(0), ns=(second, second))
        results.append(watch.check({}, 1.0))
    return [words for words in results if words]


def test_fault_23_a_hang_on_a_full_disk_is_found(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The full disk explained the silence of a rank for ever."""
    watch = HangDetector(folder, 1, least_seconds=2)
    folder.events(0).touch()
    watch.check({0: make_steps(0, 10)}, 1.0)
    monkeypatch.setattr(RunFolder, "is_on_full_disk", True)
    (words,) = touch_metrics(folder, watch, 100)
    assert "is full" in words and "the ranks train on" in words and not watch.hangs
    (words,) = wait(watch, 2 * BUSY_FACTOR + 5)
    assert words.startswith("no step for ") and watch.hangs
    assert words.endswith("rank 0: its stack could not be written, because the disk is full")
    (words,) = touch_metrics(folder, watch, 5)
    assert "the ranks train on" in words and not watch.hangs
    assert watch.check({0: make_steps(10, 1)}, 1.0) == "steps are logged again"


def test_fault_23_metrics_lost_to_a_quota_are_no_hang(folder: RunFolder) -> None:
    watch = HangDetector(folder, 1, least_seconds=2)
    folder.events(0).touch()
    watch.check({0: make_steps(0, 10)}, 1.0)
    (words,) = touch_metrics(folder, watch, 100)
    assert "metrics cannot be written to " in words and "The ranks train on" in words and not watch.hangs


def test_the_final_status_does_not_wait_for_the_last_writes(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "kill_descendants", lambda **_: True)
    monkeypatch.setattr(run_end, "FINISH_SECONDS", 0.0)
    supervisor, had_status = Supervisor(folder, None, ReceivedSignals()), []
    write_json(folder.supervisor, {})
    os.utime(folder.supervisor, (1, 1))
    own = partial_file(folder.error(0))
    half = own.with_suffix(".999999999")  # Of a rank that was killed while it wrote.
    half.touch()

    def yield_pieces() -> Iterator[None]:
        for _ in range(3):
            had_status.append(folder.status.exists())
            yield

    monkeypatch.setattr(supervisor.checks, "finish", yield_pieces)
    supervisor._finish()
    assert had_status == [False, True, True]
    assert not half.exists()
    assert folder.supervisor.stat().st_mtime > 1, "a heartbeat between pieces"


def test_restarted_step_counts_and_other_records_are_progress(folder: RunFolder) -> None:
    watch = HangDetector(folder, 1, least_seconds=5)
    watch.check({0: make_steps(0, 10)}, 1.0)
    for _ in range(5):  # Each time four seconds after the last.
        assert wait(watch, 3) == []
        assert watch.check({0: make_steps(0, 2)}, 1.0) is None
    for _ in range(5):
        assert wait(watch, 3) == []
        assert watch.check({0: [{"step": 1, "time": 5000.0, "validation": 1.0}]}, 1.0) is None
    assert watch.ranks[0].still_seconds == 0


def test_slow_steps_have_a_limit_of_many_medians(folder: RunFolder, ranks: list[Any]) -> None:
    watch = HangDetector(folder, 2, least_seconds=10)
    watch.check({0: make_steps(0, 6, seconds=30.0)}, 1.0)
    assert wait(watch, 600) == []
    assert len(wait(watch, 10)) == 1


def test_several_records_of_a_step_are_one_step(folder: RunFolder, ranks: list[Any]) -> None:
    """Validation logged a moment after each step halved the median, and slow steps were hangs."""
    watch = HangDetector(folder, 1, least_seconds=10)
    records = make_steps(0, 8, seconds=30.0)
    again = [{**record, "time": record["time"] + 0.1, "validation": 1.0} for record in records]
    both = [one for pair in zip(records, again, strict=True) for one in pair]
    watch.check({0: both}, 1.0)
    assert wait(watch, 590) == []
    assert len(wait(watch, 20)) == 1


@pytest.mark.parametrize("when", [None, "late", [1.0]])
def test_records_without_a_time_are_no_step_times(folder: RunFolder, when: Any) -> None:
    watch = HangDetector(folder, 1, least_seconds=10)
    records = make_steps(0, 8)
    watch.check({0: [{**record, "time": when} for record in records]}, 1.0)
    assert not watch.has_steps
    watch.check({0: records}, 1.0)
    assert watch.has_steps


def test_the_limit_is_that_of_the_environment(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDSCOPE_HANG_SECONDS", "7")
    watch = HangDetector(folder, 1)
    watch.check({0: make_steps(0, 8)}, 1.0)
    assert wait(watch, 6) == []
    assert len(wait(watch, 8)) == 1
    assert StandstillDetector(folder, 1).quiet_seconds == 70


@pytest.mark.parametrize("ranks", [("save_checkpoint", "wait")], indirect=True)
def test_a_checkpoint_extends_the_limit_but_not_forever(folder: RunFolder, ranks: list[Any]) -> None:
    watch = HangDetector(folder, 2, least_seconds=2)
    watch.check({0: make_steps(0, 10), 1: make_steps(0, 10)}, 1.0)
    assert wait(watch, 2 * BUSY_FACTOR - 1) == []
    (words,) = wait(watch, 8)
    assert "rank 0 is at a checkpoint" in words
    # Each request interrupts the ranks, so they come at twice the time of the last one.
    requests = folder.stacks(0).read_text().count(" in save_checkpoint\n")
    assert 2 <= requests <= 5


def test_start_up_ended_ranks_and_a_suspended_machine_are_not_hangs(folder: RunFolder) -> None:
    watch = HangDetector(folder, 2, least_seconds=2)
    assert wait(watch, 100) == []  # Nothing logged yet: loading, compiling, or a task that logs nothing.
    watch.check({0: make_steps(0, 5)}, 1.0)
    assert wait(watch, 100) == []  # Four times are too few for a median.
    watch.check({0: make_steps(5, 5)}, 1.0)
    assert watch.check({}, 3600.0) is None and watch.ranks[0].still_seconds == 5.0
    write_json(folder.rank(0), {"pid": 1, "started": 1.0, "exit": "finished"})
    assert wait(watch, 100) == []


def test_fault_05_the_report_names_ranks_that_are_stopped_or_gone(
    folder: RunFolder, ranks: list[Any]
) -> None:
    ranks[0].send_signal(signal.SIGSTOP)
    ranks[1].kill()
    ranks[1].wait()
    while read_process_state(ranks[0].pid) != "T":
        time.sleep(0.01)
    watch = HangDetector(folder, 2, least_seconds=2)
    watch.check({0: make_steps(0, 10)}, 1.0)
    (words,) = wait(watch, 10)
    assert f"rank 0: process {ranks[0].pid} is stopped" in words
    assert "rank 1: it did not answer" in words


STACKS = """Thread 0x00007f1 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/checkpoint/async.py", line 5 in write
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f2 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3046 in all_reduce
  File "/env/lib/python3.11/site-packages/torch/{part}.py", line 8 in inner
  File "/home/me/my task.py", line 7 in <lambda>
"""


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("nn/modules/module", None),  # The writer in another thread explains nothing.
        ("distributed/checkpoint/state_dict_saver", "at a checkpoint"),
        ("_dynamo/convert_frame", "compiling"),
        ("_inductor/output_code", None),  # A compiled graph that runs.
        ("profiler/profiler", "writing a trace"),
    ],
)
def test_only_the_main_threads_stack_explains_a_delay(part: str, words: str | None) -> None:
    stacks = STACKS.replace("{part}", part)
    assert [function for _, _, function in parse_main_thread(stacks)] == ["all_reduce", "inner", "<lambda>"]
    assert find_delay_reason(stacks) == words
    assert (
        describe_position(stacks)
        == "all_reduce (distributed_c10d.py:3046), called from <lambda> (my task.py:7)"
    )
    engine = STACKS.replace("/site-packages/torch/{part}.py", "/shardscope/frameworks/some/engine.py")
    assert find_delay_reason(engine) is None
    assert find_delay_reason(engine.replace(" in inner", " in export")) == "at a checkpoint"
    assert describe_position("") == "" and find_delay_reason("it did not answer") is None


def test_our_files_listed_as_delay_reasons_exist() -> None:
    ours = [file.relative_to(TOOLKIT.parent).as_posix() for file in TOOLKIT.rglob("*.py")]
    parts = [part for part in (*BUSY_WITH, *ENGINE_FOLDERS) if part.startswith("shardscope/")]
    assert parts and not [part for part in parts if not any(file.startswith(part) for file in ours)]


def test_fault_05_a_stopped_rank_is_named_first_of_many(folder: RunFolder) -> None:
    """Ranks inside of ``backward()`` wait without a Python frame that says so, at the same step."""
    replies = dict.fromkeys(range(7), STACKS.format(part="_tensor")) | {7: f"process 42 {STOPPED}: -CONT\n"}
    report = build_report(
        "steps", replies, hangs=True, waited=61, median=0.1, steps=dict.fromkeys(range(8), 4)
    )
    assert report.stopped == (7,) and "; rank 7: process 42 is stopped by SIGSTOP" in describe_hang(report)
    assert parse_report(json.loads(json.dumps(report.to_record()))) == report


def test_fault_05_the_reason_of_a_hang_stays_while_metrics_are_skipped(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDSCOPE_HANG_SECONDS", "2")
    monkeypatch.setattr(periodic_checks, "METRIC_BYTES_PER_CHECK", 2**13)
    monkeypatch.setattr(periodic_checks, "MAX_BEHIND_BYTES", 2**14)
    checks = PeriodicChecks(folder, 2, print, writes_tensorboard=False)

    def log(rank: int, first: int, count: int) -> None:
        with folder.events(rank).open("a") as file:
            file.writelines(f"{json.dumps(record)}\n" for record in make_steps(first, count))

    log(0, 0, 10)
    log(1, 0, 10)
    messages = [checks.check(1.0, is_running=True)]
    for second in range(8):  # Rank 0 hangs, rank 1 logs on.
        log(1, 10 + second, 1)
        messages.append(checks.check(1.0, is_running=True))
    (hang,) = filter(None, messages)
    assert hang.startswith("no step for ") and "rank 0 is " in hang and checks.run_hangs
    for second in range(5):
        log(1, 100 + 1000 * second, 1000)
        assert checks.check(1.0, is_running=True) is None and checks.run_hangs
    assert checks._events[1].num_skipped_bytes > 0
    # Once rank 0 is back, that is the news, and the skipped metrics come after it.
    log(0, 10, 1)
    log(1, 5100, 1000)
    assert checks.check(1.0, is_running=True) == "steps are logged again" and not checks.run_hangs
    log(0, 11, 1)
    assert (checks.check(1.0, is_running=True) or "").startswith("rank 1 logs more lines of metrics")


def test_fault_05_ranks_that_have_returned_are_named(folder: RunFolder, ranks: list[Any]) -> None:
    """A rank with fewer batches returns; torch elastic keeps its process, whose stack says nothing."""
    watch = HangDetector(folder, 2, least_seconds=2)
    watch.check({0: make_steps(0, 10), 1: make_steps(0, 11)}, 1.0)
    write_json(folder.rank(0), {**(read_json(folder.rank(0)) or {}), "exit": "finished"})
    (words,) = wait(watch, 10)
    assert "; rank 0 has returned from the task; rank 1: wait (<string>:" in words
    assert "behind" not in words and "rank 0: " not in words
    assert watch.report is not None and parse_report(json.loads(json.dumps(watch.report.to_record())))
    several = watch.report._replace(returned=tuple(range(6)), positions={7: "here"})
    assert "; ranks 0, 1, 2, 3 and more have returned from the task; rank 7: here" in describe_hang(several)
