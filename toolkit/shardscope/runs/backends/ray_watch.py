"""Status of a Ray run whose nodes have not started, or whose node 0 is lost: what its coordinator wrote."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from shardscope.machine.os_errors import is_absent
from shardscope.records.folder import RAY, RunFolder
from shardscope.records.json_files import read_json

PATIENCE_SECONDS = 30.0
"""Time without a sign of life, which comes every few seconds, after which the coordinator is lost."""
SUBMIT_PATIENCE_SECONDS = 400.0
"""Time for the launch to start the coordinator."""


class State(NamedTuple):
    """What the coordinator knows, in ``ray/state.json``."""

    phase: str
    """waiting, starting, running or ended."""
    reason: str
    time: float
    verdict: str
    """stopped or failed once it has ended; empty if the supervisors have written how."""
    end: str = ""
    """Why it ends the supervisors, by a signal; empty if it does not."""


def state_file(folder: RunFolder) -> Path:
    """Return the file of the coordinator's state."""
    return folder.path / RAY / "state.json"


def lost_node_file(folder: RunFolder, node: int) -> Path:
    """Return the file in which the coordinator records that a node is lost, and why."""
    return folder.path / RAY / f"lost-{node}.json"


def describe_ray_end(folder: RunFolder) -> str:
    """Return why the coordinator ends the run, one line; empty if it does not, or for a run without one."""
    return str((read_json(state_file(folder)) or {}).get("end", ""))


class RayWatch:
    """What the coordinator has written about one run."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._beat = (0.0, time.monotonic())

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
        if self._is_silent():
            lost = f"its Ray coordinator has given no sign of life for {PATIENCE_SECONDS:.0f} s"
            return {"status": "lost", "reason": f"{lost}; before: {reason}"}
        return {"status": "queued" if phase == "waiting" else "starting", "reason": reason}

    def explain_lost(self) -> str:
        """Return what the coordinator knows about the loss of node 0; empty if nothing."""
        lost = read_json(lost_node_file(self._folder, 0))
        if lost is not None:
            return f"node 0: {lost.get('reason')}"
        record = read_json(state_file(self._folder)) or {}
        return str(record.get("reason")) if record.get("verdict") == "failed" else ""

    def _is_silent(self) -> bool:
        """Return whether the coordinator's sign of life is too old, measured by our own clock."""
        try:
            beat = state_file(self._folder).stat().st_mtime
        except OSError as error:
            if is_absent(error):
                return False
            raise
        if beat != self._beat[0]:
            self._beat = (beat, time.monotonic())
        return time.monotonic() - self._beat[1] > PATIENCE_SECONDS
