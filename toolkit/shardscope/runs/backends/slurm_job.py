"""Slurm's commands: read the records of ``scontrol show``, the state of a job, and cancel a job."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import read_json

SECONDS = 20.0
"""Maximum time of one command: a busy controller may take seconds."""
WAITING_STATES = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESV_DEL_HOLD"}
)
LIVE_STATES = WAITING_STATES | {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING"}
FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z:/_]*)=(.*?)(?=\s[A-Za-z][A-Za-z:/_]*=|$)")
"""A field of a one-line record; a value may contain blanks."""


class SlurmError(OSError):
    """A Slurm command is missing, failed, or did not answer in time."""


class Job(NamedTuple):
    """State of one job."""

    state: str
    """PENDING, RUNNING, COMPLETING, CANCELLED, ..."""
    reason: str
    """Slurm's reason why it waits or ended; empty if there is none."""
    start: str
    """When it started, or is estimated to start, in Slurm's spelling; empty if unknown."""
    nodes: str
    preempted: bool
    restarts: int = 0
    """How often Slurm has started it again; counts from the request on, also while the job still ends."""
    end: str = ""
    """When its time is over, in Slurm's spelling; empty if unknown."""
    requeues: bool = False
    """Whether Slurm may start it again."""

    @property
    def is_waiting(self) -> bool:
        """Return whether it has not started."""
        return self.state in WAITING_STATES

    @property
    def is_live(self) -> bool:
        """Return whether it waits or runs."""
        return self.state in LIVE_STATES


def run_command(*command: str, seconds: float = SECONDS) -> str:
    """Return the output of a Slurm command; invalid UTF-8 becomes the replacement character.

    Raises ``SlurmError`` with its message if it fails, and if it cannot be started.
    """
    # In English, and without what an interactive allocation of the user has set.
    environment = {**clean_environment(os.environ), "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",  # Names and comments of jobs may be in another encoding.
            timeout=seconds,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise SlurmError(f"{command[0]} is not on PATH: this machine has no Slurm commands") from error
    except OSError as error:  # The process limit, or the memory.
        raise SlurmError(f"{command[0]} could not be started: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        # It repeats what it waits for, such as a file that it does not find. Bytes, despite text=True.
        written = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr
        lines = (written or "").strip().splitlines()
        cause = f"; it says: {lines[-1][-300:]}" if lines else ""
        raise SlurmError(f"{command[0]} did not answer within {seconds:.0f} s{cause}") from error
    if done.returncode:
        raise SlurmError(f"{command[0]}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without the variables of an allocation in which the kernel may run.

    srun and sbatch take them for options: a job would get the task count of that allocation. Options of the
    user's own, such as SBATCH_ACCOUNT, are in the job script: ``slurm.read_environment``. Which cluster is
    asked, and the token with which, is the user's choice, too (sbatch(1), scontrol(1)).
    """
    ours = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")
    return {
        name: value
        for name, value in environment.items()
        if name in ours or not name.startswith(("SLURM_", "SLURMD_", "SBATCH_", "SRUN_"))
    }


def parse_records(text: str) -> list[dict[str, str]]:
    """Return the fields of each line of ``scontrol show ... --oneliner``."""
    lines = (line for line in text.splitlines() if "=" in line)
    return [{name: value.strip() for name, value in FIELD.findall(line)} for line in lines]


def read_job(job_id: str) -> Job | None:
    """Return a job's state; None if Slurm has no record of it (any more). Raises ``SlurmError``."""
    try:
        records = parse_records(run_command("scontrol", "show", "job", "--oneliner", job_id))
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    if not records:
        return None
    record = records[-1]
    return Job(
        state=record.get("JobState", ""),
        reason=_read_text(record.get("Reason", "")),
        start=_read_text(record.get("StartTime", "")),
        nodes=_read_text(record.get("NodeList", "")),
        preempted=bool(_read_text(record.get("PreemptTime", ""))),
        restarts=int(restarts) if (restarts := record.get("Restarts", "")).isdecimal() else 0,
        end=_read_text(record.get("EndTime", "")),
        requeues=record.get("Requeue") == "1",
    )


def _read_text(value: str) -> str:
    return "" if value in ("None", "Unknown", "(null)", "N/A") else value


def read_job_id(folder: RunFolder) -> str | None:
    """Return the id of the run's job; None before it was submitted, and for a run of this machine."""
    job_id = (read_json(folder.job) or {}).get("job_id")
    # It becomes an argument of scontrol and scancel.
    return job_id if isinstance(job_id, str) and job_id.isdecimal() and job_id.isascii() else None


def describe_job_end(folder: RunFolder) -> str:
    """Return why Slurm ended the run's job, one line; empty if the reason is not known."""
    job_id = read_job_id(folder)
    try:
        job = None if job_id is None else read_job(job_id)
    except SlurmError:
        return ""
    return "" if job is None else f"Slurm {explain_end(job)} job {job_id}"


def explain_end(job: Job) -> str:
    """Return why a job ended, as a phrase to put between "Slurm" and "job 12", such as "preempted"."""
    if job.state == "TIMEOUT" or job.reason == "TimeLimit":
        return "ended at its time limit"
    if job.preempted or job.state == "PREEMPTED":
        return "preempted"
    if job.state == "NODE_FAIL" or job.reason == "NodeDown":
        return "lost a node of"
    return "cancelled (scancel)"


def requeue(job_id: str) -> None:
    """Put a job back into the queue; it is started anew. Raises ``SlurmError``."""
    run_command("scontrol", "requeue", job_id)


def exclude_nodes(job_id: str, names: Iterable[str]) -> None:
    """Exclude nodes from the next start of a job that waits, besides those already excluded.

    Raises ``SlurmError``.
    """
    records = parse_records(run_command("scontrol", "show", "job", "--oneliner", job_id))
    before = _read_text(records[-1].get("ExcNodeList", "")) if records else ""
    run_command(
        "scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(filter(None, (before, *names)))}"
    )


def read_kill_wait() -> float | None:
    """Return the seconds from SIGTERM to SIGKILL of a job that Slurm ends. Raises ``SlurmError``."""
    match = re.search(r"^KillWait\s*=\s*(\d+)", run_command("scontrol", "show", "config"), re.MULTILINE)
    return float(match[1]) if match else None


def read_controller_time() -> float | None:
    """Return the controller's time in seconds since the epoch; None if unknown. Raises ``SlurmError``."""
    # The controller stamps its answer (slurm 22.05, src/slurmctld/proc_req.c, _fill_ctld_conf).
    match = re.search(r"^Configuration data as of (\S+)", run_command("scontrol", "show", "config"))
    return parse_time(match[1]) if match else None


def parse_time(text: str) -> float | None:
    """Return a time in Slurm's spelling, as seconds since the epoch; None if it is none."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def cancel_waiting(job_id: str) -> None:
    """Cancel a job if it has not started. Raises ``SlurmError``."""
    run_command("scancel", "--state=PENDING", job_id)


def cancel(job_id: str) -> None:
    """Cancel a job. Raises ``SlurmError``."""
    run_command("scancel", job_id)
