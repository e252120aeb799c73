"""The small files of a run, and their readers."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shardscope.machine.processes import identify_machine, is_alive, read_start_time
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import (
    LineTail,
    append_line,
    encode,
    read_json,
    read_lines,
    read_tail_text,
    write_json,
)
from shardscope.runs import runs
from shardscope.runs.launch.supervision.run_end import read_markers
from shardscope.runs.launch.supervision.supervisor_process import ReceivedSignals
from shardscope.runs.launch.supervisor import Supervisor
from shardscope.runs.run import Run
from shardscope.runs.summaries import RunSummaries


def test_an_incomplete_line_is_read_once_complete(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = LineTail(path)
    assert tail.read() == []
    path.write_bytes(b'{"a": 1}\n{"a": ')
    assert tail.read() == [{"a": 1}] and tail.read() == []
    with path.open("ab") as file:
        file.write(b'2}\nnonsense\n\n[3]\n{"b": "\xff"}\n')
    assert tail.read() == [{"a": 2}, {"b": "\ufffd"}]
    assert tail.num_malformed == 2
    path.write_bytes(b'{"c": 1}\n')
    assert tail.read() == [{"c": 1}]
    path.unlink()
    assert (
        tail.read() == []
        and read_lines(path) == []
        and read_json(path) is None
        and read_tail_text(path, 5) == ""
    )


def test_every_line_is_valid_json(tmp_path: Path) -> None:
    record = {
        "nan": float("nan"),
        "inf": [float("-inf")],
        "odd": Path("/x"),
        "surrogate": "\udc80",
        "nested": {1: (2,)},
    }
    line = json.loads(encode(record), parse_constant=pytest.fail)
    assert line == {"nan": "NaN", "inf": ["-Infinity"], "odd": "/x", "surrogate": "?", "nested": {"1": [2]}}
    write_json(tmp_path / "x.json", {"a": 1})
    assert (
        read_json(tmp_path / "x.json") == {"a": 1} and (tmp_path / "x.json").stat().st_mode & 0o777 == 0o600
    )


def test_a_process_is_identified_by_pid_and_start_time() -> None:
    started = read_start_time(os.getpid())
    assert started is not None and is_alive(os.getpid(), started) and not is_alive(os.getpid(), started + 1)
    assert read_start_time(2**22 + 1) is None


def _run(tmp_path: Path, supervisor: dict[str, object] | None, status: str = "running") -> Run:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    write_json(folder.run_json, {"world_size": 1, "created": 1.0})
    append_line(folder.status, {"time": time.time() - 100, "status": status, "reason": "r"})
    if supervisor is not None:
        write_json(folder.supervisor, supervisor)
    return Run(folder)


def test_a_reused_pid_is_not_the_supervisor(tmp_path: Path) -> None:
    started = read_start_time(os.getpid())
    assert started is not None
    run = _run(tmp_path, {"pid": os.getpid(), "started": started, "machine": identify_machine()})
    assert run.status == "running"
    write_json(
        run.folder / "supervisor.json",
        {"pid": os.getpid(), "started": started - 5, "machine": identify_machine()},
    )
    assert run.status == "lost" and "without a final status" in run.reason
    append_line(run.folder / "status.jsonl", {"time": 1, "status": "finished", "reason": "done"})
    assert run.status == "finished"


def test_fault_25_a_run_on_another_machine_is_lost_without_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(tmp_path, {"pid": 1, "started": 1.0, "machine": "elsewhere"})
    now = time.monotonic()
    assert run.status == "running"
    monkeypatch.setattr(time, "monotonic", lambda: now + 100)
    assert run.status == "lost"
    os.utime(run.folder / "supervisor.json", (1, 1))
    assert run.status == "running"


@pytest.mark.parametrize("jump_seconds", [-1e7, -60.0, 60.0, 1e7])
def test_fault_25_setting_the_clock_ends_no_run(
    jump_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = {"pid": os.getpid(), "started": read_start_time(os.getpid()), "machine": identify_machine()}
    run = _run(tmp_path, me)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_seconds)
    assert read_start_time(os.getpid()) == me["started"] and run.status == "running"
    began = time.monotonic()
    assert run.wait(0.1) == "running"
    assert 0.1 <= time.monotonic() - began < 2
    run.stop()
    (command,) = read_lines(run.folder / "control.jsonl")
    assert command["command"] == "stop"
    append_line(run.folder / "status.jsonl", {"time": time.time(), "status": "stopped", "reason": "asked"})
    assert (run.status, run.reason) == ("stopped", "asked")


OTHER_THAN_ABSENT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EIO, errno.ESTALE)


@pytest.mark.parametrize("number", OTHER_THAN_ABSENT)
@pytest.mark.parametrize("unreadable", ["supervisor.json", "stat", "run"])
def test_fault_53_unreadable_files_do_not_count_as_absent(
    unreadable: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor's record, its supervisor in /proc, its folder."""
    me = {"pid": os.getpid(), "started": read_start_time(os.getpid()), "machine": identify_machine()}
    run = _run(tmp_path, me)
    assert run.status == "running"
    with monkeypatch.context() as patch:
        break_path(unreadable, number, patch)
        assert run.status == "running" and run.wait(0.1) == "running"
        assert run.reason.startswith("r; status possibly outdated: ")
    assert (run.status, run.reason) == ("running", "r")


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR])
def test_fault_53_a_run_with_absent_files_is_lost(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = {"pid": os.getpid(), "started": read_start_time(os.getpid()), "machine": identify_machine()}
    run = _run(tmp_path, me)
    break_path("stat", number, monkeypatch)
    assert run.status == "lost"


def break_path(name: str, number: int, patch: pytest.MonkeyPatch) -> None:
    """Have every access to files and folders of that name fail by the error ``number``."""

    def fail_on_path(function: Any) -> Any:
        def access_path(path: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(path, str | Path) and Path(path).name == name:
                raise OSError(number, os.strerror(number))
            return function(path, *arguments, **options)

        return access_path

    for place, function in ((Path, "open"), (Path, "read_bytes"), (Path, "stat"), (os, "open")):
        patch.setattr(place, function, fail_on_path(getattr(place, function)))


def test_fault_53_a_supervisor_waits_for_records_that_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them a finished run would be reported as failed."""
    run = _run(tmp_path, None)
    write_json(run._folder.rank(0), {"exit": "finished"})
    logged: list[str] = []
    with monkeypatch.context() as patch:
        break_path("rank-0.json", errno.EMFILE, patch)
        timer = threading.Timer(0.5, patch.undo)
        timer.start()
        assert read_markers(run._folder, 1, logged.append) == [{"exit": "finished"}]
    run._folder.rank(0).unlink()
    assert read_markers(run._folder, 1, logged.append) == [{}]


@pytest.mark.parametrize("number", OTHER_THAN_ABSENT)
def test_fault_53_a_supervisor_that_cannot_reach_its_folder_continues(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(tmp_path, None)
    supervisor = Supervisor(run._folder, None, ReceivedSignals())
    with monkeypatch.context() as patch:
        break_path("run", number, patch)
        patch.setattr(os, "utime", lambda path: Path(path).parent.stat())
        supervisor._send_heartbeat()
    assert supervisor.stop.phase == "run"
    shutil.rmtree(run.folder)
    supervisor._send_heartbeat()
    assert supervisor.stop.phase == "terminate"


@pytest.mark.parametrize("digits", [400, 5000])
def test_fault_61_integers_beyond_float_range(digits: int, tmp_path: Path) -> None:
    """With such integers in metrics and run.json, this run and all others are still listed and compared."""
    huge = "9" * digits
    for name in ("good", "huge"):
        folder = RunFolder(tmp_path / name)
        folder.create()
        number = huge if name == "huge" else "1"
        folder.run_json.write_text(f'{{"world_size": 1, "created": 1.0, "num_steps": {number}}}')
        append_line(folder.status, {"time": 1.0, "status": "finished", "reason": ""})
        lines = [f'{{"step": {n}, "rank": 0, "time": {n}, "loss": {number}}}\n' for n in range(3)]
        folder.events(0).write_text("".join(lines))
    whole = runs(tmp_path)
    assert whole[0].name == "good" and "good" in whole._repr_html_()
    summaries = {summary.name: summary for summary in RunSummaries(tmp_path).read()}
    assert set(summaries) == {"good", "huge"}
    assert summaries["good"].loss == 1.0 and summaries["good"].num_steps == 1
    # Such a number is an infinity, or its line or its folder counts as damaged.
    assert summaries["huge"].num_steps is None and summaries["huge"].loss in (None, math.inf)
    for run in whole[1:]:
        assert whole.compare("good", run)._repr_html_()
        assert all(line["loss"] == math.inf for line in run.metrics())


def test_fault_24_a_supervisor_that_never_started_and_a_deleted_folder(tmp_path: Path) -> None:
    run = _run(tmp_path, None, "starting")
    assert run.status == "lost" and "never started" in run.reason
    shutil.rmtree(run.folder)
    assert run.status == "lost" and run.reason == "its folder is gone"
    assert (
        run.metrics() == [] and run.logs(0) == "" and list(run.memory()) == [] and run.engine_reports() == {}
    )
    run.stop()
    assert run.wait(1) == "lost"
    for timeout in ("x", float("nan"), -1, True, [1]):
        with pytest.raises(ValueError, match=r"run\.wait timeout is .*; allowed: a number from 0 to"):
            run.wait(timeout)  # type: ignore[arg-type]


def test_attaching_to_other_folders_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run at all"):
        Run.attach(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        Run.attach(tmp_path / "none")
    assert runs(tmp_path / "none") == []


DAMAGED = [
    '{"world_size": "two", "created": 1.0}',
    '{"world_size": 1000000000, "created": 1.0}',
    '{"world_size": NaN}',
    '{"world_size": true}',
    '{"created": 1.0}',
    '{"world_size": 1, "created": "yesterday"}',
    '{"world_size": 1, "created": NaN}',
    '{"world_size": 1, "created": 1' + "0" * 400 + "}",
    "[1]",
    '{"world_size"',
    "",
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_run_does_not_hide_an_undamaged_one(text: str, tmp_path: Path) -> None:
    good = _run(tmp_path, None, "finished")
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "run.json").write_text(text)
    assert [run.name for run in runs(tmp_path)] == ["run"]
    assert Run.attach(tmp_path).folder == good.folder
    with pytest.raises(ValueError, match=r"bad/run\.json is damaged: .*Nearest fix"):
        Run.attach(bad)
    shutil.rmtree(good.folder)
    with pytest.raises(ValueError, match=r"it contains: bad \(damaged\)"):
        Run.attach(tmp_path)


def test_fault_41_a_pipe_in_place_of_run_json(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    os.mkfifo(tmp_path / "bad" / "run.json")
    assert runs(tmp_path) == []


@pytest.mark.parametrize("record", [{"pid": "x", "started": 1.0}, {"started": 1.0}])
def test_a_damaged_supervisor_record_counts_as_none(record: dict[str, object], tmp_path: Path) -> None:
    assert _run(tmp_path, record).status == "lost"


def test_the_error_without_a_trace_names_both_causes(tmp_path: Path) -> None:
    both = "recorded no trace: profile=True was not set, or it ended before the profiled steps did"
    with pytest.raises(ValueError, match=both):
        _run(tmp_path, None, "stopped").trace()


def test_the_error_without_a_trace_of_a_live_run_says_so(tmp_path: Path) -> None:
    run = _run(tmp_path, {"pid": os.getpid(), "started": read_start_time(os.getpid())}, "running")
    with pytest.raises(
        ValueError, match=r", which is running, has recorded no trace so far\..* run\.profile\(\)"
    ):
        run.trace()


@pytest.mark.parametrize("folder", [None, 5, True, float("nan"), [], b"runs", "a\0b"])
def test_folders_that_are_not_a_path_raise(folder: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Run\.attach folder is .*allowed: text or a Path"):
        Run.attach(folder)
    if folder is not None:
        with pytest.raises(ValueError, match=r"runs folder is .*allowed: text or a Path"):
            runs(folder)
