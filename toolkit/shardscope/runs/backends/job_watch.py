"""Status of a submitted run before its nodes have started: why its Slurm job waits, or why it has ended.

Slurm is queried in a thread, at most every few seconds: its controller may take seconds to answer, and a
notebook reads the status four times a second.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time

from shardscope.machine.processes import identify_machine
from shardscope.records.attempts import has_begun
from shardscope.records.folder import FINAL, SUBMISSION, RunFolder
from shardscope.records.json_files import partial_file, read_json, read_lines, write_json
from shardscope.records.json_values import is_number
from shardscope.runs.backends.job_log import advise, describe_failed_setup, find_job_log, read_job_log
from shardscope.runs.backends.slurm_job import Job, SlurmError, explain_end, read_job, read_job_id
from shardscope.runs.stop_request import describe_stop_request

ASK_SECONDS = 3.0
"""Minimum time between two queries of Slurm."""
STALE_SECONDS = 10.0
"""Age at which an answer is not used any more."""
ANSWER_SECONDS = 0.5
"""Time that a reader waits for a new answer, if there is no other."""
PATIENCE_SECONDS = 10.0
"""Time after the end of a job before its run counts as failed: on NFS, files appear seconds late."""
SUBMIT_PATIENCE_SECONDS = 150.0
"""Time after which a run without a job id counts as never submitted."""
END_SEEN = "end_seen.json"
"""When a reader first saw that the job had ended, in the folder of the submission."""
ANOTHER_TARGET = "it may never start: stop the run, and launch it with another"
WAIT_ADVICE = {
    "AccountNotAllowed": f"{ANOTHER_TARGET} ss.Slurm(account=)",
    "BadConstraints": f"{ANOTHER_TARGET} ss.Slurm(constraint=, extra=), or on another partition",
    "DependencyNeverSatisfied": f"{ANOTHER_TARGET} dependency in ss.Slurm(extra=)",
    "InvalidAccount": f"{ANOTHER_TARGET} ss.Slurm(account=)",
    "InvalidQOS": f"{ANOTHER_TARGET} ss.Slurm(qos=)",
    "JobHeldAdmin": "it is held until an administrator releases it",
    "JobHeldUser": "it is held until you release it: scontrol release {job_id}",
    "JobHoldMaxRequeue": "it was started too often, and is held: scontrol release {job_id}",
    "PartitionConfig": f"{ANOTHER_TARGET} number of nodes or ss.Slurm(extra=), or on another partition",
    "PartitionDown": "it starts when an administrator has set the partition UP",
    "PartitionInactive": "it starts when an administrator has set the partition UP",
    "PartitionNodeLimit": f"{ANOTHER_TARGET} number of nodes, or on another partition",
    "PartitionTimeLimit": f"{ANOTHER_TARGET} ss.Slurm(time=): sinfo -o '%P %l' lists the partitions' limits",
    "QOSNotAllowed": f"{ANOTHER_TARGET} ss.Slurm(qos=)",
    "ReqNodeNotAvail": "sinfo -R and scontrol show reservation list why",
    "Nodes required for job are DOWN": "sinfo -R lists why nodes are down or drained",
    "job requeued in held state": "it is held until you release it: scontrol release {job_id}",
    "launch failed requeued held": "a node could not start it, so it is held: scontrol release {job_id}",
}
"""What to do about reasons with which a job waits until somebody acts (Slurm's job_reason_codes)."""
LIMITS = "sacctmgr show qos and sacctmgr show assoc list the limits"
LIMIT_ADVICE = {
    re.compile(r"(QOS|Assoc)(Max\w*Per(Job|Node)(Limit)?|Min\w+)|MaxMemPerLimit"): (
        f"a limit for one job of your account, QOS or partition; {ANOTHER_TARGET} ss.Slurm(time=, account=, "
        f"qos=, extra=) or number of nodes; {LIMITS}"
    ),
    re.compile(r"(QOS|Assoc)Grp\w*((?<!Run)Minutes|Wall)(Limit)?"): (
        "too little is left of the budget of your account or QOS for this job with its time limit; "
        f"{ANOTHER_TARGET} ss.Slurm(account=, qos=) or a shorter time=; {LIMITS}"
    ),
    # The same reason as for a request that is itself above the limit (src/slurmctld/acct_policy.c).
    re.compile(r"(QOS|Assoc)(Grp|Max)\w+|Max\w+Per(Account|User)"): (
        "it starts when other jobs of your user, account or QOS have ended, or never if it alone is above "
        f"the limit; {LIMITS}"
    ),
}
"""The same about limits that are set in Slurm's accounting, by the first pattern of their names."""


class JobWatch:
    """Reader of the state of one run's Slurm job."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._is_asking = False
        self._answer_time = -STALE_SECONDS
        self._answered = threading.Event()
        self._answer: Job | None = None
        self._problem = ""
        self._ended_since: float | None = None

    def describe(self, since: float, recorded: str = "") -> dict[str, object] | None:
        """Return the status of a run without a started node; None if the recorded status still holds.

        ``since`` is the age in seconds of the recorded status, ``recorded`` its reason if the job has been
        put back into the queue.
        """
        stored = read_json(self._folder.job_end)
        if stored is not None and stored.get("status") in FINAL:
            return {"reason": "", **stored}
        job_id = read_job_id(self._folder)
        if job_id is None:
            is_overdue = since > SUBMIT_PATIENCE_SECONDS
            return {"status": "lost", "reason": "its job was never submitted"} if is_overdue else None
        job, is_answered, problem = self._get_answer(job_id)
        before = f"{recorded}; " if recorded else ""
        stop = self._describe_unheard_stop(job_id)
        if problem:
            reason = f"{before}job {job_id}; Slurm does not answer: {problem}{stop}"
            return {"status": "queued", "reason": reason}
        if not is_answered:
            return {"status": "queued", "reason": f"{recorded or f'job {job_id}'}{stop}"}
        if job is not None and job.is_live:
            self._ended_since = None
            live = describe_live_job(job_id, job, before)
            return {**live, "reason": f"{live['reason']}{stop}"} if job.is_waiting else live
        # Ended, or forgotten (slurm.conf(5), MinJobAge), and no node has written anything.
        if self._ended_since is None:
            self._ended_since = time.monotonic() - self._count_seconds_since_end(job)
        # A job that never had nodes has no files to wait for.
        never_started = job is not None and job.state == "CANCELLED" and not job.nodes
        if not never_started and time.monotonic() - self._ended_since < PATIENCE_SECONDS:
            state = f"has ended ({job.state})" if job is not None else "is not known to Slurm any more"
            reason = f"{before}job {job_id} {state}; waiting {PATIENCE_SECONDS:.0f} s for the nodes' files"
            return {"status": "stopping", "reason": reason}
        return self._store_end(self._describe_end(job_id, job))

    def describe_without_lead(self, attempt: int) -> dict[str, object] | None:
        """Return the status of a run whose node 0 is gone without a word; None if its job has ended.

        Without a status: as recorded, until Slurm has answered or while the job is suspended.
        """
        job_id = read_job_id(self._folder)
        if job_id is None:
            return None
        job, is_answered, problem = self._get_answer(job_id)
        if problem or not is_answered:
            return {}
        if job is None or not job.is_live:
            return None
        if job.state == "SUSPENDED":
            return {"reason": f"Slurm has suspended job {job_id}; it trains on when Slurm resumes it"}
        if job.restarts >= attempt:
            return describe_live_job(job_id, job, f"attempt {attempt} ended without notice; ")
        if not job.requeues:
            return None
        reason = f"node 0 gives no sign of life; job {job_id} has not ended yet, and may start again"
        return {"status": "stopping", "reason": reason}

    def _get_answer(self, job_id: str) -> tuple[Job | None, bool, str]:
        """Return the job, whether Slurm has answered lately, and the error if it could not be asked."""
        self._ask(job_id)
        with self._lock:
            is_fresh = time.monotonic() - self._answer_time < STALE_SECONDS
        # An old answer may be about an earlier attempt.
        if not is_fresh:
            self._answered.wait(ANSWER_SECONDS)
        with self._lock:
            is_fresh = time.monotonic() - self._answer_time < STALE_SECONDS
            return self._answer, is_fresh, self._problem

    def _ask(self, job_id: str) -> None:
        with self._lock:
            if self._is_asking or time.monotonic() - self._answer_time < ASK_SECONDS:
                return
            self._is_asking = True
            self._answered.clear()
        try:
            threading.Thread(target=self._read, args=(job_id,), daemon=True).start()
        except RuntimeError:  # The process limit is reached.
            self._is_asking = False

    def _read(self, job_id: str) -> None:
        job, problem = None, "its answer was not understood"
        try:
            job, problem = read_job(job_id), ""
        except SlurmError as error:
            problem = str(error)
        finally:  # Slurm is asked again after any other error too.
            with self._lock:
                self._answer, self._problem = job, problem
                self._answer_time, self._is_asking = time.monotonic(), False
                self._answered.set()

    def _find_stop(self) -> dict[str, object] | None:
        """Return the first stop that a user has requested; None if there is none."""
        lines = read_lines(self._folder.control)
        # Those of an earlier attempt itself have put the job back into the queue.
        stops = (line for line in lines if line.get("command") == "stop" and line.get("attempt") is None)
        return next(stops, None)

    def _describe_unheard_stop(self, job_id: str) -> str:
        """Return what becomes of a stop that has not cancelled the job; empty if there is none.

        Slurm did not answer when it was requested. A reader cancels nothing: the folder may be another
        user's, and its job's id that of any job.
        """
        requested = (self._find_stop() or {}).get("time")
        if not is_number(requested) or time.time() - requested < STALE_SECONDS:
            return ""
        return (
            f"; the stop that was requested ends it when it starts, and run.stop() or scancel {job_id} "
            "on a login node now"
        )

    def _describe_end(self, job_id: str, job: Job | None) -> dict[str, object]:
        stop = self._find_stop()
        again = " again" if has_begun(self._folder) else ""
        if stop is not None:
            return {
                "status": "stopped",
                "reason": f"{describe_stop_request(stop)} before any rank started{again}",
            }
        if job is not None and job.state == "CANCELLED":
            reason = f"Slurm {explain_end(job)} job {job_id} before it started{again}"
            return {"status": "stopped", "reason": reason}
        state = f"ended as {job.state}" if job is not None else "is not known to Slurm any more"
        reason = f"job {job_id} {state}, and no node has written into the run folder"
        failed_setup = describe_failed_setup(self._folder)
        line, log = read_job_log(self._folder)
        if not log:
            where = f" ({job.nodes})" if job is not None and job.nodes else ""
            reason += (
                f", nor has it a log there: most likely its nodes{where} do not see {self._folder.path}. Use "
                f"folder= on a file system that they share. Slurm's record: scontrol show job {job_id}"
            )
            return {"status": "failed", "reason": reason}
        causes = "; ".join(filter(None, (failed_setup, f"{find_job_log(self._folder)} ends with: {line}")))
        text = ". ".join(filter(None, (reason, causes, advise(line))))
        return {"status": "failed", "reason": text, "error": f"{reason}.\n\n{log}"}

    def _count_seconds_since_end(self, job: Job | None) -> float:
        """Return for how long readers on this machine have known that the job has ended.

        The first of them writes it down. A command that reads the status once, such as ``shardscope runs``,
        would begin to wait for the nodes' files again each time, and never report the end.
        """
        path, machine = self._folder.path / SUBMISSION / END_SEEN, identify_machine()
        record, restarts = read_json(path) or {}, None if job is None else job.restarts
        seen = record.get("time")
        is_this_end = record.get("machine") == machine and restarts in (None, record.get("restarts"))
        if is_this_end and is_number(seen) and seen <= time.time():
            return time.time() - seen
        with contextlib.suppress(OSError):  # The folder may be another user's.
            write_json(path, {"machine": machine, "time": time.time(), "restarts": restarts})
        return 0.0

    def _store_end(self, end: dict[str, object]) -> dict[str, object]:
        """Write the end of a run that no node will write, unless another process was faster."""
        record = {"time": time.time(), **end}
        partial = partial_file(self._folder.job_end)
        # The folder may be another user's, and some file systems have no hard links: then each reader asks.
        with contextlib.suppress(OSError):
            try:
                write_json(partial, record)
                os.link(partial, self._folder.job_end)
                self._folder.task.unlink(missing_ok=True)
            finally:
                partial.unlink(missing_ok=True)
        return record


def describe_live_job(job_id: str, job: Job, before: str = "") -> dict[str, object]:
    """Return the status of a run whose job waits, or has just started; ``before`` starts the reason."""
    # A job that was put back into the queue is COMPLETING until its processes have ended.
    if not job.is_waiting and job.state != "COMPLETING":
        where = f" on {job.nodes}" if job.nodes else ""
        return {"status": "starting", "reason": f"{before}job {job_id} has started{where}"}
    # scontrol writes "launch_failed_requeued_held" and "ReqNodeNotAvail,_UnavailableNodes:node[1-2]"; squeue
    # has blanks.
    why = job.reason.replace("_", " ")
    reason = f"{before}job {job_id} waits" + (f": {why}" if why else "")
    limits = (text for pattern, text in LIMIT_ADVICE.items() if pattern.fullmatch(why))
    advice = WAIT_ADVICE.get(why.partition(",")[0], "") or next(limits, "")
    if advice:
        reason += f" ({advice.format(job_id=job_id)})"
    if job.start:
        reason += f"; estimated start {job.start.replace('T', ' ')}"
    return {"status": "queued", "reason": reason}
