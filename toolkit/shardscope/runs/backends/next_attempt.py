"""The next attempt of a run: whether there is one, and the request to Slurm that brings it.

The supervisor of node 0 asks, after the ranks of all nodes have ended and before the job does. If node 0 is
lost, the others ask. The job stays the same one: Slurm starts it again on free nodes, and counts its starts.
On Ray the coordinator starts the next attempt, on this machine the supervisor itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardscope.records.attempts import find_obeyed_bytes, read_attempts, write_beginning, write_end
from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import read_json, write_json
from shardscope.records.json_values import is_int
from shardscope.runs.backends.end_notice import EndNotice
from shardscope.runs.backends.slurm_job import (
    SlurmError,
    cancel,
    exclude_nodes,
    read_job,
    read_job_id,
    requeue,
)
from shardscope.runs.launch.supervision.run_end import FinalStatus
from shardscope.training.checkpoints.folders import POSITION_FILE, list_resumable
from shardscope.training.recording import ENTRY

MAX_IDLE_ATTEMPTS = 3
"""Attempts in a row that Slurm may end before they have saved a new checkpoint."""


def read_restart_attempt() -> int:
    """Return the number of the attempt that this process of a Slurm step belongs to."""
    return 1 + int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def may_start_again(description: Mapping[str, object]) -> bool:
    """Return whether a run with this ``run.json`` starts again after Slurm has ended its job.

    A built-in task does, from its checkpoint. A function starts at its beginning, so only on request.
    """
    return description.get("trains_the_plan") is True or get_retries(description) > 0


def get_retries(description: Mapping[str, object]) -> int:
    """Return ``launch(retries=)`` of a run."""
    retries = description.get("retries")
    return retries if is_int(retries) and retries > 0 else 0


def find_newest(folder: RunFolder) -> tuple[Path | None, int]:
    """Return the newest complete checkpoint of a run, None if there is none, and its number of steps."""
    for checkpoint in reversed(list_resumable(folder.path)):
        num_steps = (read_json(checkpoint / POSITION_FILE) or {}).get("num_steps_done")
        if is_int(num_steps):
            return checkpoint, num_steps
    return None, 0


def begin_attempt(folder: RunFolder) -> None:
    """Choose the checkpoint of an attempt, and record its beginning. Raises ``OSError``."""
    if folder.attempt > 1:
        _end_recordings(folder)
    checkpoint, from_step = find_newest(folder) if folder.attempt > 1 else (None, 0)
    write_beginning(
        folder, checkpoint=checkpoint, from_step=from_step, control_bytes=find_obeyed_bytes(folder)
    )


def _end_recordings(folder: RunFolder) -> None:
    """Mark recordings that ended with an earlier attempt: a stop would wait for their traces."""
    for path in folder.engine_report(0).parent.glob("rank-*.json"):
        report = read_json(path) or {}
        entry = report.get(ENTRY)
        if isinstance(entry, dict) and entry.get("state") == "recording":
            write_json(path, {**report, ENTRY: {**entry, "state": "failed"}})


def describe_beginning(folder: RunFolder) -> str:
    """Return where an attempt begins, as a clause; empty for the first one."""
    if folder.attempt == 1:
        return ""
    latest = next((item for item in read_attempts(folder) if item["attempt"] == folder.attempt), {})
    name = f"attempt {folder.attempt}"
    if latest.get("checkpoint") is None:
        return f"{name} starts again at the beginning: no attempt before it has saved a checkpoint"
    return f"{name} resumes at step {latest['from_step']:,} from {latest['checkpoint']}"


def explain_no_retry(folder: RunFolder, description: Mapping[str, object], *, failed: bool) -> str:
    """Return why no attempt follows this one, which has not ended by itself; empty if one does.

    ``failed``: a rank failed or a node was lost. Otherwise Slurm has ended the job.
    """
    before = [item for item in read_attempts(folder) if item["attempt"] != folder.attempt]
    retries = get_retries(description)
    if failed or description.get("trains_the_plan") is not True:
        counted = [item for item in before if item["status"] == "failed"] if failed else before
        if len(counted) < retries:
            return ""
        if retries:
            return f"all {retries} retries are used up"
        return "retries=0" if failed else "a function starts again only with retries="
    _, newest = find_newest(folder)
    first_steps = [item["from_step"] for item in (*before, *_select(folder))][-MAX_IDLE_ATTEMPTS:]
    if len(first_steps) == MAX_IDLE_ATTEMPTS and all(step == newest for step in first_steps):
        return (
            f"{MAX_IDLE_ATTEMPTS} attempts in a row have saved no new checkpoint: launch it with "
            "resume= and a longer ss.Slurm(time=) or a smaller save_every="
        )
    return ""


def _select(folder: RunFolder) -> list[dict[str, object]]:
    return [item for item in read_attempts(folder) if item["attempt"] == folder.attempt]


class AttemptEnding(NamedTuple):
    """The supervisor's own knowledge of how an attempt ended."""

    notice: EndNotice | None
    """What Slurm announced; None if it did not end the job."""
    stopped_by_user: bool
    lost_nodes: Sequence[str]
    """Slurm's names of the nodes that were lost."""
    control_bytes: int
    """Size of the part of ``control.jsonl`` that was obeyed."""


def conclude_attempt(
    folder: RunFolder,
    description: Mapping[str, object],
    final: FinalStatus,
    ending: AttemptEnding,
    log: Callable[[str], None],
) -> FinalStatus:
    """Record the end of an attempt, and request the next one if one follows. Return the run's status."""
    rank = final.details.get("rank")
    node = rank // len(folder.select_ranks(_count_ranks(description))) if is_int(rank) else None
    node = node if isinstance(folder, NodeFolder) else None
    try:
        details = {**final.details, "node": node, "control_bytes": ending.control_bytes}
        write_end(folder, final.status, final.reason, **details)
    except OSError as error:
        log(f"the end of attempt {folder.attempt} was not recorded: {error}")
    # A rank may also have failed because Slurm ended its helper processes.
    is_interrupted = ending.notice is not None and final.status != "finished"
    may_follow = (is_interrupted or final.status == "failed") and not ending.stopped_by_user
    why_not = (
        explain_no_retry(folder, description, failed=not is_interrupted) if may_follow else "it has ended"
    )
    job_id = read_job_id(folder)
    if not why_not:
        reason = f"attempt {folder.attempt + 1} follows: {final.reason}"
        if job_id is None:  # The coordinator on Ray starts it, on this machine the supervisor.
            return FinalStatus("queued" if isinstance(folder, NodeFolder) else "starting", reason, {})
        why_not = request_next_attempt(job_id, folder.attempt, log, ending.lost_nodes)
        if not why_not:
            return FinalStatus("queued", reason, {})
    if job_id is not None and (ending.lost_nodes or (ending.notice and ending.notice.kind == "requeued")):
        # srun would wait for a lost node until Slurm gives it up; and Slurm would start the job again.
        _try_to_cancel(job_id, log)
    if may_follow and (get_retries(description) or is_interrupted):
        return final._replace(reason=f"{final.reason}; it is not started again: {why_not}")
    return final


def replace_lead(folder: NodeFolder, description: Mapping[str, object], log: Callable[[str], None]) -> None:
    """Request the next attempt from another node, because node 0 is lost; or cancel the job."""
    job_id = read_job_id(folder)
    if job_id is None:
        return
    if not explain_no_retry(folder, description, failed=True):
        name = (read_json(folder.create_peer(0).node_json) or {}).get("name")
        why_not = request_next_attempt(job_id, folder.attempt, log, [str(name)] if name else [])
        if not why_not:
            return
        log(why_not)
    # srun would wait for the lost node until Slurm gives it up.
    _try_to_cancel(job_id, log)


def conclude_without_lead(
    folder: RunFolder, description: Mapping[str, object], reason: str, node: int | None
) -> str:
    """Record the end of an attempt whose node 0 is lost. Return why none follows; empty if one does.

    ``node`` is the first lost one. Raises ``OSError``.
    """
    write_end(folder, "failed", reason, node=node)
    return explain_no_retry(folder, description, failed=True)


def request_next_attempt(
    job_id: str, attempt: int, log: Callable[[str], None], lost_nodes: Sequence[str] = ()
) -> str:
    """Ask Slurm to start the job again, without ``lost_nodes``. Return why it does not, else nothing."""
    try:
        job = read_job(job_id)
        if job is None:
            return f"Slurm does not know job {job_id} any more"
        if job.restarts < attempt:
            requeue(job_id)
    except SlurmError as error:
        return f"Slurm does not start job {job_id} again: {error}"
    if lost_nodes:
        try:
            exclude_nodes(job_id, lost_nodes)
        except SlurmError as error:  # Slurm starts no job on a node that it has given up itself.
            log(f"could not exclude {', '.join(lost_nodes)}: {error}")
    return ""


def _try_to_cancel(job_id: str, log: Callable[[str], None]) -> None:
    try:
        cancel(job_id)
    except SlurmError as error:
        log(f"job {job_id} was not cancelled: {error}")


def _count_ranks(description: Mapping[str, object]) -> int:
    world_size = description.get("world_size")
    return world_size if is_int(world_size) else 1
