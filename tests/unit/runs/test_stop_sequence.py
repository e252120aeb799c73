"""The phases of a stop: who starts it, what the ranks get, and when it escalates. The clock is fake."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from shardscope.records.folder import NODES, NodeFolder, RunFolder
from shardscope.records.json_files import append_line, read_lines, write_json
from shardscope.runs.backends import end_notice
from shardscope.runs.backends.slurm_job import Job
from shardscope.runs.launch.supervision.stop_sequence import StopSequence

USER_STOP = {"command": "stop", "checkpoint": False}
USER_SAVE = {"command": "stop", "checkpoint": True}
END = "2026-01-02T12:00:00"
ENDED_JOB = Job("COMPLETING", "TimeLimit", "", "node0", preempted=False, end=END, requeues=True)
KILL_WAIT = 30.0


class FakeRun:
    """A supervisor with a clock that only tests move, and no ranks."""

    def __init__(self, folder: RunFolder, **description: object) -> None:
        self.now = 1000.0
        self.signals: list[int] = []
        self.statuses: list[tuple[str, str]] = []
        self.lines: list[str] = []
        self.seems_to_hang = False
        self.returned = False
        self.folder = folder
        self.stop = StopSequence(folder, description, self, lambda: self.now)

    def has_returned_unasked(self) -> bool:
        return self.returned

    def signal_ranks(self, number: int) -> None:
        self.signals.append(number)

    def set_status(self, status: str, reason: str) -> None:
        self.statuses.append((status, reason))

    def log(self, text: str) -> None:
        self.lines.append(text)

    def command(self, command: dict[str, object]) -> None:
        append_line(self.folder.control, command)
        self.stop.obey_commands()

    def pass_time(self, seconds: float) -> list[int]:
        """Return the signals that the ranks get within ``seconds``."""
        before, end = len(self.signals), self.now + seconds
        while self.now < end:
            self.now = min(self.now + 0.5, end)
            self.stop.advance()
        return self.signals[before:]


@pytest.fixture
def node(tmp_path: Path) -> NodeFolder:
    """Node 0 of a job of Slurm with two nodes."""
    folder = RunFolder(tmp_path / "run")
    folder.create(NODES)
    write_json(folder.job, {"scheduler": "slurm", "job_id": "7"})
    return NodeFolder(folder.path, 0, 2, 1)


def set_job(monkeypatch: pytest.MonkeyPatch, job: Job, seconds_left: float = 0.0) -> None:
    """Let Slurm describe job 7 as ``job``, whose time is over in ``seconds_left``."""
    now = time.mktime(time.strptime(END, "%Y-%m-%dT%H:%M:%S")) - seconds_left
    monkeypatch.setattr(end_notice, "read_job", lambda job_id: job)
    monkeypatch.setattr(end_notice, "read_kill_wait", lambda: KILL_WAIT)
    monkeypatch.setattr(end_notice, "read_controller_time", lambda: now)


def test_a_stop_terminates_then_kills(folder: RunFolder) -> None:
    run = FakeRun(folder)
    assert run.pass_time(10_000) == [] and not run.stop.ends_processes
    run.command(USER_STOP)
    assert run.signals == [signal.SIGTERM] and run.stop.has_signalled and run.stop.by_user
    assert run.statuses == [("stopping", "run.stop() was called")]
    run.command(USER_STOP)  # The second one changes nothing.
    assert run.pass_time(1.4) == [] and run.pass_time(0.2) == [signal.SIGKILL]
    assert run.pass_time(1.5) == [signal.SIGKILL], "again, until the launcher is gone"
    assert run.stop.reason == "run.stop() was called" and run.stop.time == 11_000.0


def test_a_stop_with_a_checkpoint_becomes_a_plain_one(folder: RunFolder) -> None:
    run = FakeRun(folder, trains_the_plan=True)
    run.command(USER_SAVE)
    assert run.stop.phase == "checkpoint" and run.statuses[0][1].endswith("finish their step and save")
    assert run.pass_time(599) == [] and run.pass_time(1) == [signal.SIGTERM]
    assert run.stop.reason == "the ranks did not save and stop within 600 s"


def test_a_plain_stop_overrides_one_with_a_checkpoint(folder: RunFolder) -> None:
    run = FakeRun(folder)
    run.command(USER_SAVE)
    run.command(USER_STOP)
    assert run.signals == [signal.SIGTERM] and run.stop.reason == "run.stop() was called"


def write_recording(folder: RunFolder, rank: int, state: str, **more: object) -> None:
    folder.engine_report(rank).parent.mkdir(exist_ok=True)
    write_json(folder.engine_report(rank), {"recording": {"number": 1, "state": state, **more}})


def test_a_plain_stop_waits_for_the_trace_of_a_recording(folder: RunFolder) -> None:
    run = FakeRun(folder, world_size=2, trains_the_plan=True)
    write_recording(folder, 1, "recording")
    run.command(USER_STOP)
    assert run.pass_time(60) == [] and run.statuses[0][0] == "stopping" and "trace" in run.statuses[0][1]
    write_recording(folder, 1, "written")
    assert run.pass_time(0.5) == [signal.SIGTERM]
    assert run.stop.reason == "run.stop() was called" and run.stop.by_user


def test_a_second_stop_ends_ranks_that_write_a_trace(folder: RunFolder) -> None:
    run = FakeRun(folder, world_size=2)
    write_recording(folder, 0, "recording")
    run.command(USER_STOP)
    run.command(USER_STOP)
    assert run.signals == [signal.SIGTERM]


def test_a_function_that_records_and_no_longer_reads_commands_is_ended_in_a_minute(folder: RunFolder) -> None:
    """It was ended after ten."""
    run = FakeRun(folder, world_size=2)
    write_recording(folder, 0, "recording")
    run.command(USER_STOP)
    assert run.pass_time(59) == [] and run.pass_time(2) == [signal.SIGTERM]
    assert run.stop.reason.startswith("run.stop() was called; ")
    # One that writes its trace has read the stop, and a training task reads it after its step, however long.
    for description, more in (({}, {"is_writing": True}), ({"trains_the_plan": True}, {})):
        other = FakeRun(folder, world_size=2, **description)
        write_recording(folder, 0, "recording", **more)
        other.stop.begin("stop", checkpoint=False)
        assert other.pass_time(300) == []


def test_the_end_of_the_kernel_keeps_the_trace_of_a_recording(folder: RunFolder) -> None:
    run = FakeRun(folder, world_size=1)
    write_recording(folder, 0, "recording")
    run.stop.end_with_kernel()
    run.stop.obey_commands()
    assert run.pass_time(5) == [] and run.statuses[0][0] == "stopping"
    (command,) = read_lines(folder.control)
    assert command["command"] == "stop", "the ranks read it"
    write_recording(folder, 0, "written")
    assert run.pass_time(0.5) == [signal.SIGTERM] and run.stop.reason == "the kernel that launched it ended"
    idle = FakeRun(folder, world_size=1)
    idle.stop.end_with_kernel()
    assert idle.signals == [signal.SIGTERM]


def test_no_attempt_follows_the_end_of_the_kernel(folder: RunFolder) -> None:
    """A rank that failed meanwhile, or a notice of Slurm, started the run again without its kernel."""
    for stop, description in ((USER_SAVE, {"trains_the_plan": True}), (None, {})):
        watched = FakeRun(folder, **description)
        if stop is not None:
            watched.stop.begin("job 7 is near its time limit", checkpoint=True)
        watched.command({"command": "stop", "kernel_ended": True})
        local = FakeRun(folder)
        local.stop.end_with_kernel()
        assert watched.stop.by_user and local.stop.by_user


def test_the_end_of_the_kernel_does_not_cut_off_a_checkpoint_that_a_stop_requested(folder: RunFolder) -> None:
    run = FakeRun(folder, trains_the_plan=True)
    run.command(USER_SAVE)
    run.stop.end_with_kernel()
    assert run.signals == [] and run.stop.phase == "checkpoint"
    run.command({"command": "stop", "kernel_ended": True})
    assert run.pass_time(599) == [] and run.pass_time(2) == [signal.SIGTERM]


def test_a_stop_after_a_rank_died_does_not_wait_for_its_recording(folder: RunFolder) -> None:
    """A rank that died never writes its trace: the others waited for torch elastic, 30 s."""
    run = FakeRun(folder, world_size=2)
    write_recording(folder, 1, "recording")
    run.stop.record_dead_rank()
    run.command(USER_STOP)
    assert run.signals == [signal.SIGTERM]


def test_ranks_that_hang_while_they_record_are_ended(folder: RunFolder) -> None:
    run = FakeRun(folder, world_size=1, trains_the_plan=True)
    write_recording(folder, 0, "recording")
    run.command(USER_STOP)
    run.seems_to_hang = True
    run.stop.update_checkpoint_deadline()
    assert run.pass_time(119) == [] and run.pass_time(1) == [signal.SIGTERM]
    assert "did not write the trace" in run.stop.reason
    # One that hung before the stop has no time at all.
    other = FakeRun(folder, world_size=1)
    other.seems_to_hang = True
    other.stop.begin("stop", checkpoint=False)
    assert other.signals == [signal.SIGTERM]


def test_ranks_that_hang_have_less_time_for_a_checkpoint(folder: RunFolder) -> None:
    run = FakeRun(folder)
    run.seems_to_hang = True
    run.command(USER_SAVE)
    assert run.statuses[0][1].endswith("they seem to hang, and have 120 s")
    assert run.pass_time(119) == [] and run.pass_time(1) == [signal.SIGTERM]
    assert run.stop.reason.endswith("within 120 s, and seem to hang")
    # If they log steps again, they have the whole time.
    other = FakeRun(folder)
    other.seems_to_hang = True
    other.stop.begin("stop", checkpoint=True)
    other.seems_to_hang = False
    other.stop.update_checkpoint_deadline()
    assert other.pass_time(599) == []


def test_a_dead_rank_ends_the_others_without_a_stop(folder: RunFolder) -> None:
    run = FakeRun(folder)
    run.stop.record_dead_rank()
    assert run.pass_time(2.9) == [] and run.pass_time(0.1) == [signal.SIGKILL]
    assert run.stop.reason is None and run.stop.a_rank_died


def test_leftovers_are_killed_without_a_stop(folder: RunFolder) -> None:
    run = FakeRun(folder)
    run.stop.kill_leftovers()
    assert run.signals == [signal.SIGKILL] and run.stop.ends_processes and not run.stop.has_signalled
    run.command(USER_STOP)
    assert run.stop.reason is None, "the task had returned"


def test_a_stop_after_the_task_has_returned_is_recorded_as_such(folder: RunFolder) -> None:
    run = FakeRun(folder)
    run.returned = True
    run.command(USER_STOP)
    assert run.stop.returned_first


def test_commands_that_are_no_stop_of_this_attempt_are_ignored(folder: RunFolder) -> None:
    run = FakeRun(folder, saves_when_asked=False)
    run.command({**USER_STOP, "attempt": 2})
    run.command({"command": "profile"})
    assert run.lines == []
    run.command({"command": 3})
    assert run.lines == ["ignored 1 malformed lines of control.jsonl"]
    run.command(USER_SAVE)
    assert "never reads ctx.should_stop" in run.lines[-1]
    assert run.signals == [] and run.stop.phase == "run"


def test_a_signal_ends_a_run_of_this_machine(folder: RunFolder) -> None:
    run = FakeRun(folder)
    assert not run.stop.obey_signal(signal.SIGTERM)
    assert run.signals == [signal.SIGTERM] and run.stop.by_signal and not run.stop.by_user
    assert run.stop.reason == "the supervisor got SIGTERM"


def test_a_signal_that_is_noticed_after_the_end_is_its_reason(node: NodeFolder) -> None:
    run = FakeRun(node)
    run.stop.record_late_signal(signal.SIGUSR2)
    assert run.stop.reason is None
    run.stop.record_late_signal(signal.SIGTERM)
    assert run.stop.reason == "the supervisor got SIGTERM" and run.stop.by_signal and run.signals == []


def test_a_late_signal_does_not_replace_the_reason_of_a_stop(node: NodeFolder) -> None:
    run = FakeRun(node)
    run.command(USER_STOP)
    run.stop.record_late_signal(signal.SIGTERM)
    assert run.stop.reason == "run.stop() was called" and run.stop.by_user and not run.stop.by_signal


@pytest.mark.parametrize(("waited", "left"), [(10, 25), (590, 10)])
def test_the_end_of_a_job_shortens_the_time_for_a_requested_checkpoint(
    node: NodeFolder, monkeypatch: pytest.MonkeyPatch, waited: float, left: float
) -> None:
    """The user's stop gives 600 s, Slurm 25; the earlier of both ends counts."""
    set_job(monkeypatch, ENDED_JOB)
    run = FakeRun(node)
    run.command(USER_SAVE)
    assert run.pass_time(waited) == []
    assert run.stop.obey_signal(signal.SIGTERM)
    assert run.pass_time(left - 1) == [] and run.pass_time(1) == [signal.SIGHUP]


def test_slurm_leaves_time_for_a_checkpoint(node: NodeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    set_job(monkeypatch, ENDED_JOB)
    run = FakeRun(node)
    assert run.stop.obey_signal(signal.SIGTERM)
    (command,) = read_lines(node.control)
    assert command["checkpoint"] is True and command["attempt"] == 1, "the ranks of all nodes read it"
    assert run.stop.phase == "checkpoint" and not run.stop.by_user and not run.stop.by_signal
    assert run.pass_time(24) == [] and run.pass_time(1) == [signal.SIGHUP]
    assert run.stop.reason.startswith("Slurm ended job 7 at its time limit: the ranks did not save")
    assert run.pass_time(2) == [signal.SIGKILL]


def test_a_cancelled_job_ends_at_once(node: NodeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    set_job(monkeypatch, ENDED_JOB._replace(reason=""))
    run = FakeRun(node)
    assert not run.stop.obey_signal(signal.SIGTERM)
    assert run.signals == [signal.SIGHUP] and run.stop.by_signal and run.stop.notice is None


def test_a_requeued_task_that_cannot_save_ends_at_once(
    node: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_job(monkeypatch, ENDED_JOB._replace(restarts=1))
    run = FakeRun(node, saves_when_asked=False)
    assert run.stop.obey_signal(signal.SIGTERM)
    assert run.signals == [signal.SIGHUP] and "back into the queue" in run.stop.reason


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("job", "reason", "seconds"),
    [
        (ENDED_JOB, "Slurm ended job 7 at its time limit", KILL_WAIT),
        (ENDED_JOB._replace(state="RUNNING", reason="", preempted=True), "Slurm preempts job 7", 600.0),
    ],
)
def test_a_task_that_cannot_save_is_ended_before_slurm_kills_it(
    node: NodeFolder, number: int, job: Job, reason: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_job(monkeypatch, job, seconds)
    run = FakeRun(NodeFolder(node.path, number, 2, 1), saves_when_asked=False)
    assert run.stop.obey_signal(signal.SIGTERM)
    assert run.pass_time(seconds - 6) == [], "it may return by itself"
    assert run.pass_time(3) == [signal.SIGHUP, signal.SIGKILL]
    assert run.stop.reason == reason and run.stop.notice is not None and not run.stop.by_user
    assert run.statuses == [("stopping", reason)]


def test_a_task_that_cannot_save_is_not_ended_by_a_warning(
    node: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_job(monkeypatch, ENDED_JOB._replace(state="RUNNING", reason=""), 90)
    run = FakeRun(node, saves_when_asked=False)
    assert run.stop.obey_signal(signal.SIGUSR2)
    assert run.pass_time(300) == [], "Slurm may extend the time limit"
    # The time of the warning is over, that of Slurm's end is not.
    set_job(monkeypatch, ENDED_JOB)
    assert run.stop.obey_signal(signal.SIGTERM)
    assert run.pass_time(24) == [] and run.pass_time(1) == [signal.SIGHUP]


def test_a_node_that_sees_no_command_is_ended_before_slurm_kills_it(
    node: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_job(monkeypatch, ENDED_JOB)
    run = FakeRun(NodeFolder(node.path, 1, 2, 1))
    assert run.stop.obey_signal(signal.SIGTERM)
    assert run.stop.phase == "run" and run.pass_time(25) == [signal.SIGHUP]


def test_a_dead_rank_counts_more_than_the_end_of_the_job(
    node: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_job(monkeypatch, ENDED_JOB)
    run = FakeRun(node, saves_when_asked=False)
    run.stop.obey_signal(signal.SIGTERM)
    run.stop.record_dead_rank()
    assert run.pass_time(3) == [signal.SIGKILL] and run.stop.reason is None
