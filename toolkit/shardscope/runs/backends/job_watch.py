"""Status of a run whose nodes have not started, from Slurm: why it waits, or how its job ended without them.

Slurm is asked in a thread, at most every few seconds: its controller may take seconds to answer, and a
notebook reads the status four times a second.
"""

from __future__ import annotations

import contextlib
import threading
import time

from shardscope.records.folder import SUBMISSION, RunFolder
from shardscope.records.json_files import read_lines, read_tail_text
from shardscope.runs.backends.slurm_job import Job, SlurmError, explain_end, read_job, read_job_id
from shardscope.runs.stop_request import describe_stop_request

ASK_SECONDS = 3.0
"""Time between two questions."""
PATIENCE_SECONDS = 10.0
"""Time between the end of a job and the verdict that no node has written: NFS shows files seconds later."""
SUBMIT_PATIENCE_SECONDS = 150.0
"""Time for the launch to write the job's id."""
LOG_CHARACTERS = 1000


class JobWatch:
    """What Slurm says about one run's job."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._is_asking = False
        self._asked = -ASK_SECONDS
        self._answer: Job | None = None
        self._is_answered = False
        self._problem = ""
        self._ended_since: float | None = None

    def describe(self, since: float) -> dict[str, object] | None:
        """Return the status and its reason; None if they are as recorded.

        ``since`` is the age in seconds of the recorded status.
        """
        job_id = read_job_id(self._folder)
        if job_id is None:
            is_overdue = since > SUBMIT_PATIENCE_SECONDS
            return {"status": "lost", "reason": "its job was never submitted"} if is_overdue else None
        self._ask(job_id)
        with self._lock:
            job, is_answered, problem = self._answer, self._is_answered, self._problem
        if problem:
            return {"status": "queued", "reason": f"job {job_id}; Slurm cannot be asked now: {problem}"}
        if not is_answered:
            return {"status": "queued", "reason": f"job {job_id}"}
        if job is not None and job.is_live:
            self._ended_since = None
            return describe_live_job(job_id, job)
        # Ended, or forgotten (slurm.conf(5), MinJobAge), and no node has written anything.
        if self._ended_since is None:
            self._ended_since = time.monotonic()
        if time.monotonic() - self._ended_since < PATIENCE_SECONDS:
            return None
        return self._describe_end(job_id, job)

    def _ask(self, job_id: str) -> None:
        with self._lock:
            if self._is_asking or time.monotonic() - self._asked < ASK_SECONDS:
                return
            self._is_asking = True
        try:
            threading.Thread(target=self._read, args=(job_id,), daemon=True).start()
        except RuntimeError:  # The process limit is reached.
            self._is_asking = False

    def _read(self, job_id: str) -> None:
        job, problem = None, ""
        try:
            job = read_job(job_id)
        except SlurmError as error:
            problem = str(error)
        with self._lock:
            self._answer, self._problem, self._is_answered = job, problem, True
            self._asked, self._is_asking = time.monotonic(), False

    def _describe_end(self, job_id: str, job: Job | None) -> dict[str, object]:
        stops = [line for line in read_lines(self._folder.control) if line.get("command") == "stop"]
        if stops:
            return {
                "status": "stopped",
                "reason": f"{describe_stop_request(stops[0])} before any rank started",
            }
        if job is not None and job.state == "CANCELLED":
            return {"status": "stopped", "reason": f"Slurm {explain_end(job)} job {job_id} before it started"}
        state = f"ended as {job.state}" if job is not None else "is not known to Slurm any more"
        reason = f"job {job_id} {state}, and no node has written into the run folder"
        log = read_submission_log(self._folder)
        return {"status": "failed", "reason": f"{reason}. Its log: {log}" if log else reason}


def describe_live_job(job_id: str, job: Job) -> dict[str, object]:
    """Return the status of a run whose job waits, or has just started."""
    if not job.is_waiting:
        where = f" on {job.nodes}" if job.nodes else ""
        return {"status": "starting", "reason": f"job {job_id} has started{where}"}
    reason = f"job {job_id} waits" + (f": {job.reason}" if job.reason else "")
    if job.start:
        reason += f"; estimated start {job.start.replace('T', ' ')}"
    return {"status": "queued", "reason": reason}


def read_submission_log(folder: RunFolder) -> str:
    """Return the end of the first error log of the job, one line."""
    with contextlib.suppress(OSError):
        for path in sorted((folder.path / SUBMISSION).glob("*.err")):
            text = read_tail_text(path, LOG_CHARACTERS).strip()
            if text:
                return text.splitlines()[-1]
    return ""
