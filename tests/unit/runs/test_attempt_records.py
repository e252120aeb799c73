"""Attempts of a run: their records, what follows one, and what readers see between two. Needs no Slurm."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import shardscope as ss
from shardscope.records.attempts import read_attempts, write_beginning, write_end
from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import append_line, write_json
from shardscope.records.logged_steps import LoggedSteps
from shardscope.runs.backends import end_notice, job_watch, next_attempt
from shardscope.runs.backends.next_attempt import AttemptEnding, begin_attempt, conclude_attempt
from shardscope.runs.backends.slurm_job import Job, SlurmError
from shardscope.runs.launch.commands import CommandFeed
from shardscope.runs.launch.supervision.run_end import FinalStatus

RUNNING = Job("RUNNING", "", "", "node[1-2]", preempted=False, restarts=0, requeues=True)
BUILT_IN = {"trains_the_plan": True, "world_size": 2}
NO_STOP = AttemptEnding(notice=None, stopped_by_user=False, lost_nodes=(), control_bytes=0)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    (folder.path / "nodes").mkdir()
    write_json(folder.job, {"scheduler": "slurm", "job_id": "7", "partition": "debug"})
    plan = {"world_size": 2, "num_nodes": 2, "created": time.time(), "scheduler": "slurm"}
    write_json(folder.run_json, {**plan, "name": "run", "machine": ""})
    return folder


def save_checkpoint(folder: RunFolder, num_steps: int) -> None:
    path = folder.path / "checkpoints" / f"step-{num_steps:06d}"
    path.mkdir(parents=True)
    write_json(path / "position.json", {"num_steps_done": num_steps})


def select_lead(folder: RunFolder, attempt: int) -> NodeFolder:
    return NodeFolder(folder.path, 0, 2, attempt)


def test_each_attempt_has_files_of_its_own(folder: RunFolder) -> None:
    begin_attempt(select_lead(folder, 1))
    assert folder.rank(0) == folder.path / "ranks" / "rank-0.json"
    save_checkpoint(folder, 20)
    append_line(folder.control, {"command": "stop", "attempt": 1})
    write_end(select_lead(folder, 1), "stopped", "Slurm preempts job 7", control_bytes=40)
    begin_attempt(select_lead(folder, 2))
    # A reader's folder follows the latest attempt; that of a process of the first one does not.
    assert folder.rank(0).parent == folder.path / "attempts" / "2" / "ranks"
    assert select_lead(folder, 1).own == folder.path / "nodes" / "0"
    assert folder.events(0) == folder.path / "events" / "rank-0.jsonl"
    first, second = ss.Run.attach(folder.path).attempts
    assert (first["status"], first["from_step"], first["checkpoint"]) == ("stopped", 0, None)
    assert second["from_step"] == 20 and second["checkpoint"] == "checkpoints/step-000020"
    assert second["status"] is None and second["ended"] is None


def test_an_attempt_without_node_0_is_described_by_the_others(folder: RunFolder) -> None:
    write_beginning(select_lead(folder, 1), checkpoint=None, from_step=0, control_bytes=0)
    write_beginning(select_lead(folder, 2), checkpoint=None, from_step=0, control_bytes=0)
    assert read_attempts(folder)[0]["status"] == "lost"
    other = NodeFolder(folder.path, 1, 2, 1)
    other.create_own()
    write_json(other.ended, {"time": 1.0, "status": "failed", "reason": "node 0 (a) is lost"})
    assert read_attempts(folder)[0]["reason"] == "node 0 (a) is lost"
    lead = select_lead(folder, 1)
    lead.create_own()
    write_json(lead.node_json, {"name": "a"})
    assert read_attempts(folder)[0]["reason"] == "node 0 (a) is lost"
    # A rank that has lost its peer before the node knew it: the reason was that rank's alone.
    write_json(other.ended, {"time": 1.0, "status": "failed", "reason": "rank 1 raised RuntimeError: closed"})
    reason = str(read_attempts(folder)[0]["reason"])
    assert reason.startswith("node 0 (a) ") and "rank 1 raised RuntimeError: closed" in reason


def test_steps_are_logged_once(folder: RunFolder) -> None:
    assert not LoggedSteps(select_lead(folder, 1), 0).has({"step": 0})
    for step in range(3):
        append_line(folder.events(0), {"step": step, "rank": 0, "time": 1.0, "loss": 2.0})
    with folder.events(0).open("ab") as file:
        file.write(b'{"step": 3, "rank"')
    logged = LoggedSteps(select_lead(folder, 2), 0)
    assert logged.ends_within_line and logged.last_step == 2
    assert logged.has({"step": 2, "rank": 0, "time": 9.0, "loss": 2.5})
    assert not logged.has({"step": 2, "rank": 0, "time": 9.0, "validation_loss": 2.5})
    assert not logged.has({"step": 3, "rank": 0, "time": 9.0, "loss": 2.5})


def test_commands_of_an_earlier_attempt_are_not_obeyed_again(folder: RunFolder) -> None:
    append_line(folder.control, {"command": "profile", "recording": 1})
    size = folder.control.stat().st_size
    append_line(folder.control, {"command": "stop", "attempt": 1})
    append_line(folder.control, {"command": "finish"})
    write_beginning(select_lead(folder, 2), checkpoint=None, from_step=0, control_bytes=size)
    feed = CommandFeed(select_lead(folder, 2), None)
    assert [command["command"] for command in feed.poll()] == ["finish"]


def test_a_recording_of_an_earlier_attempt_is_not_in_progress(folder: RunFolder) -> None:
    """Of a rank that was killed: a stop of the next attempt waited ten minutes for its trace."""
    folder.engine_report(0).parent.mkdir(exist_ok=True)
    write_json(folder.engine_report(0), {"recording": {"number": 1, "state": "written"}})
    write_json(folder.engine_report(1), {"zero": {}, "recording": {"number": 1, "state": "recording"}})
    begin_attempt(select_lead(folder, 2))
    assert ss.Run.attach(folder.path).engine_reports() == {
        0: {"recording": {"number": 1, "state": "written"}},
        1: {"zero": {}, "recording": {"number": 1, "state": "failed"}},
    }


@pytest.mark.parametrize(
    ("job", "is_warning", "kind", "text"),
    [
        (RUNNING._replace(state="COMPLETING", restarts=1), False, "requeued", "back into the queue"),
        (RUNNING._replace(preempted=True), False, "ending", "preempts"),
        (RUNNING, True, "ending", "time limit"),
        (RUNNING._replace(state="COMPLETING", reason="TimeLimit"), False, "ending", "time limit"),
        (RUNNING._replace(state="COMPLETING"), False, "cancelled", ""),
        (None, False, "ending", "does not answer"),
    ],
)
def test_a_signal_means_what_slurm_says(
    job: Job | None, is_warning: bool, kind: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_notice, "read_job", lambda job_id: job)
    monkeypatch.setattr(end_notice, "read_kill_wait", lambda: 30.0)
    notice = end_notice.read_end_notice("7", 1, is_warning=is_warning)
    assert notice.kind == kind and text in notice.reason
    assert kind == "cancelled" or notice.seconds >= 2


def test_a_refused_requeue_ends_the_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job_id: str) -> None:
        raise SlurmError("scontrol: Requested operation is presently disabled for job 7")

    monkeypatch.setattr(next_attempt, "read_job", lambda job_id: RUNNING)
    monkeypatch.setattr(next_attempt, "requeue", refuse)
    lead = select_lead(folder, 1)
    begin_attempt(lead)
    notice = end_notice.EndNotice("ending", "job 7 is near its time limit", 60.0)
    final = FinalStatus("stopped", "job 7 is near its time limit: every rank returned from the task", {})
    status = conclude_attempt(lead, BUILT_IN, final, NO_STOP._replace(notice=notice), print)
    assert status.status == "stopped" and "presently disabled" in status.reason
    # The user's stop counts more than Slurm's.
    ending = NO_STOP._replace(notice=notice, stopped_by_user=True)
    assert conclude_attempt(lead, BUILT_IN, final, ending, print) == final


def test_attempts_without_progress_are_bounded(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []
    monkeypatch.setattr(next_attempt, "read_job", lambda job_id: RUNNING)
    monkeypatch.setattr(next_attempt, "requeue", requested.append)
    notice = end_notice.EndNotice("ending", "Slurm preempts job 7", 60.0)
    final = FinalStatus("stopped", "Slurm preempts job 7", {})
    for attempt in range(1, 7):
        lead = select_lead(folder, attempt)
        begin_attempt(lead)
        if attempt == 2:
            save_checkpoint(folder, 10)
        status = conclude_attempt(lead, BUILT_IN, final, NO_STOP._replace(notice=notice), print)
        if status.status != "queued":
            break
    assert attempt == 5 and "3 attempts in a row" in status.reason, (attempt, status)
    assert "a longer ss.Slurm(time=)" in status.reason
    assert len(requested) == 4


def test_failures_are_retried_as_often_as_requested(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_attempt, "read_job", lambda job_id: RUNNING)
    monkeypatch.setattr(next_attempt, "requeue", lambda job_id: None)
    final = FinalStatus("failed", "rank 1 raised ValueError: no", {"error": "Traceback", "rank": 1})
    lead = select_lead(folder, 1)
    begin_attempt(lead)
    assert conclude_attempt(lead, BUILT_IN, final, NO_STOP, print) == final
    statuses = []
    for attempt in (1, 2):
        lead = select_lead(folder, attempt)
        begin_attempt(lead)
        statuses.append(conclude_attempt(lead, {**BUILT_IN, "retries": 1}, final, NO_STOP, print))
    assert statuses[0].status == "queued" and statuses[1].status == "failed"
    assert [(item["rank"], item["node"], item["error"]) for item in read_attempts(folder)] == [
        (1, 1, "Traceback")
    ] * 2


def test_readers_see_a_run_that_waits_for_its_next_attempt(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [RUNNING]
    monkeypatch.setattr(job_watch, "read_job", lambda job_id: answers[0])
    lead = select_lead(folder, 1)
    begin_attempt(lead)
    lead.create_own()
    # Its supervisor was killed, with the whole node.
    write_json(lead.supervisor, {"pid": 2**22 + 1, "started": 1.0, "machine": "another"})
    lead.set_status("running", "2 ranks at work")
    write_json(lead.supervisor, {"pid": 1, "started": 1.0, "machine": _identify()}, as_is=("machine",))
    run = ss.Run.attach(folder.path)
    assert run.status == "stopping" and "may start again" in run.reason
    answers[0] = RUNNING._replace(state="PENDING", reason="BeginTime", restarts=1)
    run = ss.Run.attach(folder.path)
    assert run.status == "queued" and "BeginTime" in run.reason
    answers[0] = RUNNING._replace(state="FAILED", requeues=False)
    assert ss.Run.attach(folder.path).status == "lost"


def _identify() -> str:
    from shardscope.machine.processes import identify_machine

    return identify_machine()
