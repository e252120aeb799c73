"""Status of a Ray run whose nodes have not started, or whose node 0 is lost: what its coordinator wrote."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shardscope.machine.os_errors import is_absent
from shardscope.records.folder import RAY, NodeFolder, RunFolder
from shardscope.records.json_files import read_json
from shardscope.records.json_values import is_int
from shardscope.training.checkpoints.folders import list_resumable

PATIENCE_SECONDS = 30.0
"""Time without a sign of life, which comes every few seconds, after which the coordinator is lost."""
STREAM_PATIENCE_SECONDS = 15.0
"""The same for the process that receives the records; less than that of the nodes' heartbeats."""
SUBMIT_PATIENCE_SECONDS = 400.0
"""Time for the launch to start the coordinator."""


class State(NamedTuple):
    """State of a Ray run as its coordinator writes it to ``ray/state.json``."""

    phase: str
    """waiting, starting, running or ended."""
    reason: str
    time: float
    verdict: str
    """stopped or failed once it has ended; empty if the supervisors have written how."""
    end: str = ""
    """Why it ends the supervisors, by a signal; empty if it does not."""
    attempt: int = 1
    """The attempt that it works for; it may have no nodes yet."""


def state_file(folder: RunFolder) -> Path:
    """Return the file of the coordinator's state."""
    return folder.path / RAY / "state.json"


def lost_node_file(folder: RunFolder, node: int) -> Path:
    """Return the file in which the coordinator records that a node of this attempt is lost, and why."""
    attempt = folder.attempt
    return folder.path / RAY / (f"lost-{node}.json" if attempt == 1 else f"lost-{node}-{attempt}.json")


def describe_lost_node(folder: RunFolder, node: int) -> str:
    """Return which node the coordinator has lost, and why; empty if it has not."""
    record = read_json(lost_node_file(folder, node))
    if record is None:
        return ""
    part = NodeFolder(folder.path, node, attempt=folder.fixed_attempt)
    return f"{part.title} is lost: {record.get('reason')}"


def is_streamed(folder: RunFolder) -> bool:
    """Return whether a run's nodes do not see this folder, so that their records are streamed to it."""
    return (read_json(folder.job) or {}).get("folder") == "streamed"


def puller_file(folder: RunFolder) -> Path:
    """Return the file whose time says when the cluster last answered the process that receives records."""
    return folder.path / "puller.json"


def received_file(folder: RunFolder) -> Path:
    """Return the file that says that nothing more will be received, and why if something is missing."""
    return folder.path / "received.json"


def describe_ray_end(folder: RunFolder) -> str:
    """Return why the coordinator ends the run, one line; empty if it does not, or for a run without one."""
    return str((read_json(state_file(folder)) or {}).get("end", ""))


class RayWatch:
    """Status of one run by the coordinator's records."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._beats: dict[str, tuple[float, float]] = {}

    def describe(self, since: float, recorded: str = "") -> dict[str, object] | None:
        """Return the status of a run none of whose nodes has started; None if it is as recorded.

        ``since`` is the age in seconds of the recorded status, and ``recorded`` its reason.
        """
        record = read_json(state_file(self._folder))
        if record is None:
            is_overdue = since > SUBMIT_PATIENCE_SECONDS
            return {"status": "lost", "reason": "it was never submitted to Ray"} if is_overdue else None
        phase, reason, verdict = (str(record.get(key)) for key in ("phase", "reason", "verdict"))
        if phase == "ended":
            return {"status": verdict if verdict == "stopped" else "failed", "reason": reason}
        if self._is_silent(state_file(self._folder), PATIENCE_SECONDS):
            lost = f"its Ray coordinator has given no sign of life for {PATIENCE_SECONDS:.0f} s"
            return {"status": "lost", "reason": f"{lost}; before: {reason}"}
        # Node 0 has put the run back into the queue, and the coordinator waits for the other nodes' ends.
        if phase == "running" and recorded and NodeFolder(self._folder.path, 0).ended.exists():
            return None
        return {"status": "queued" if phase == "waiting" else "starting", "reason": reason}

    def describe_stream(self, recorded: Mapping[str, object]) -> dict[str, object] | None:
        """Return the status of a run of which nothing has been received lately; None if all is well.

        ``recorded`` is the last one that was received.
        """
        if not is_streamed(self._folder):
            return None
        end = read_json(received_file(self._folder))
        if end is not None:
            missing = end.get("missing")
            return {"status": "lost", "reason": str(missing)} if missing else None
        if not self._is_silent(puller_file(self._folder), STREAM_PATIENCE_SECONDS):
            return None
        notice = (
            f"status possibly outdated: nothing was received from the Ray cluster for "
            f"{STREAM_PATIENCE_SECONDS:.0f} s. ss.Run.attach(run.folder) connects again"
        )
        reason = str(recorded.get("reason") or "")
        return {**recorded, "reason": f"{reason}; {notice}" if reason else notice}

    def describe_without_lead(self) -> dict[str, object] | None:
        """Return the status of a run whose node 0 left no final status; None if the reason is not known."""
        lost = describe_lost_node(self._folder, 0)
        record = read_json(state_file(self._folder))
        if record is None:
            return None
        attempt = record.get("attempt")
        if is_int(attempt) and attempt > self._folder.attempt:
            return {"status": "queued", "reason": str(record.get("reason"))}
        reason = lost or str(record.get("reason"))
        # The coordinator notices it within seconds, and lets the other nodes end first.
        is_silent = self._is_silent(state_file(self._folder), PATIENCE_SECONDS)
        if record.get("phase") != "ended" and not is_silent:
            node = NodeFolder(self._folder.path, 0)
            why = lost or f"the supervisor of {node.title} has ended without a final status"
            return {"status": "stopping", "reason": f"{why}; the other nodes end"}
        if not lost and record.get("verdict") != "failed":
            return None
        if list_resumable(self._folder.path):
            fix = "launch again with resume= for its last checkpoint"
        else:
            fix = "it has saved no checkpoint, so launch again; save_every= saves some"
        return {"status": "failed", "reason": f"{reason}. Nearest fix: {fix}"}

    def _is_silent(self, file: Path, patience_seconds: float) -> bool:
        """Return whether a sign of life is too old, measured by our own clock."""
        try:
            beat = file.stat().st_mtime
        except OSError as error:
            if is_absent(error):
                return False
            raise
        before, seen = self._beats.get(file.name, (0.0, 0.0))
        if beat != before:
            seen = time.monotonic()
            self._beats[file.name] = (beat, seen)
        return time.monotonic() - seen > patience_seconds
