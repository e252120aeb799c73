"""Slurm's notice that it will end a job: why, how much time is left, and whether the job starts again.

SIGUSR2 comes before the time limit (sbatch(1), --signal), and where the site has configured it at preemption
(slurm.conf(5), preempt_send_user_signal). SIGTERM comes at the end: at a preemption with a grace time that
time before SIGKILL, otherwise KillWait seconds (30 by default; slurm.conf(5)).
"""

from __future__ import annotations

import signal
import time
from typing import Literal, NamedTuple

from shardscope.runs.backends.slurm_job import (
    Job,
    SlurmError,
    parse_time,
    read_controller_time,
    read_job,
    read_kill_wait,
)

# Windows has no SIGUSR2: runs are read there, but not launched.
SLURM_SIGNALS = (signal.SIGTERM, getattr(signal, "SIGUSR2", signal.SIGTERM))
KILL_WAIT_SECONDS = 30.0
"""Slurm's default of KillWait."""
MARGIN_SECONDS = 5.0
"""Time that the processes need to end and to record it, after the checkpoint."""
LEAST_SECONDS = 2.0
UNLIMITED_SECONDS = 600.0
"""Time for a checkpoint if Slurm names no end."""


class EndNotice(NamedTuple):
    """Notice of Slurm that it ends the job."""

    kind: Literal["cancelled", "ending", "requeued"]
    """``cancelled`` by ``scancel``; ``ending``, so that it must be requeued to go on; ``requeued``: Slurm
    starts it again by itself."""
    reason: str
    """One line."""
    seconds: float
    """Time for a checkpoint."""


def read_end_notice(job_id: str, attempt: int, *, is_warning: bool) -> EndNotice:
    """Return what the signal means that this attempt of a job has received, from Slurm's answer.

    ``is_warning``: it was SIGUSR2, so that the job still runs.
    """
    try:
        job = read_job(job_id)
    except SlurmError:
        job = None
    if job is None:  # Save what can be saved; a job that was cancelled is not requeued.
        seconds = UNLIMITED_SECONDS if is_warning else _find_kill_seconds()
        return EndNotice(
            "ending",
            f"Slurm ends job {job_id}; its reason is not known, because Slurm does not answer",
            seconds,
        )
    if job.restarts >= attempt:
        why = (
            f"Slurm has put job {job_id} back into the queue (preemption, a failed node, or scontrol requeue)"
        )
        return EndNotice("requeued", why, _find_kill_seconds())
    if job.preempted:
        # After its grace time the job has KillWait seconds, too.
        seconds = max(_count_seconds_left(job), _find_kill_seconds())
        return EndNotice("ending", f"Slurm preempts job {job_id}", seconds)
    if is_warning:
        return EndNotice("ending", f"job {job_id} is near its time limit", _count_seconds_left(job))
    if job.state == "TIMEOUT" or job.reason == "TimeLimit":
        return EndNotice("ending", f"Slurm ended job {job_id} at its time limit", _find_kill_seconds())
    return EndNotice("cancelled", "", 0.0)


def _count_seconds_left(job: Job) -> float:
    end = parse_time(job.end)
    if end is None:
        return UNLIMITED_SECONDS
    try:
        # The controller's clock, which has set the end: this node's may differ by minutes (munge(7), TTL).
        now = read_controller_time()
    except SlurmError:
        now = None
    return max(LEAST_SECONDS, end - (time.time() if now is None else now) - MARGIN_SECONDS)


def _find_kill_seconds() -> float:
    try:
        seconds = read_kill_wait()
    except SlurmError:
        seconds = None
    return max(LEAST_SECONDS, (KILL_WAIT_SECONDS if seconds is None else seconds) - MARGIN_SECONDS)
