"""The final status of a run, derived from rank records and exit codes.

Each rank's own record comes first: only the rank that wrote "finished" knows that its task returned. Exit
codes come second. They may be lost (another process reaped it, SIGCHLD was ignored) or misleading: a process
may exit with 0 in the middle of a task, or crash in a library's cleanup after all work is saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardscope.records.folder import Status
from shardscope.runs.explain.failure import Failure, describe_exit, describe_late_exit


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The facts known when no process of a run is left."""

    markers: Sequence[Mapping[str, object]]
    """The record that each rank wrote about itself, in the order of ranks; empty where there is none."""
    failures: Sequence[Failure]
    """Failures, earliest first."""
    launcher_code: int | None
    """The launcher's exit code; None if no launcher was started."""
    stop_reason: str | None = None
    """The reason of a stop; None if none was requested before every task had returned."""
    was_ended: bool = False
    """Whether the supervisor sent signals to the ranks for that stop, and no rank had died before."""
    left_behind: str = ""
    """The processes that outlived every task and were killed for it; empty if there were none."""
    is_disk_full: bool = False
    killer: str = ""
    """The likely origin of the SIGKILL that ended the launcher; empty if none did."""


class Verdict(NamedTuple):
    """A final status and its reason, one line."""

    status: Status
    reason: str


def decide_status(evidence: Evidence) -> Verdict:
    """Return the final status of a run and why."""
    # A stop whose signals ended the ranks explains all of their exit codes and exceptions.
    if evidence.stop_reason is not None:
        if evidence.was_ended:
            return Verdict("stopped", evidence.stop_reason)
        if evidence.launcher_code is None:
            return Verdict("stopped", f"{evidence.stop_reason} before any rank started")
    # A task that returned everywhere has done its work, however its processes ended afterwards.
    if is_finished_everywhere(evidence.markers):
        if evidence.stop_reason is not None:
            return Verdict("stopped", f"{evidence.stop_reason}: every rank returned from the task")
        return Verdict("finished", f"the task returned on every rank{_describe_aftermath(evidence)}")
    if evidence.failures:
        return Verdict("failed", evidence.failures[0].reason)
    return Verdict("failed", _describe_launcher_exit(evidence))


def is_finished_everywhere(markers: Sequence[Mapping[str, object]]) -> bool:
    """Return whether the task returned on every rank, by the ranks' own records."""
    return bool(markers) and all(marker.get("exit") == "finished" for marker in markers)


def _describe_aftermath(evidence: Evidence) -> str:
    """Return what went wrong after every task had returned, to follow "the task returned on every rank"."""
    if evidence.left_behind:
        return f"; then ended {evidence.left_behind}"
    if evidence.failures:
        return f"; later, {evidence.failures[0].reason}"
    if len(evidence.markers) == 1 and evidence.launcher_code:  # The launcher is the rank.
        return f"; later, rank 0 {describe_late_exit(evidence.launcher_code)}"
    return ""


def _describe_launcher_exit(evidence: Evidence) -> str:
    """Return how the run ended if no rank left an exception or an exit code."""
    who, code = "the launcher", evidence.launcher_code
    if len(evidence.markers) == 1:
        who = "rank 0"
    elif code == 0:  # The launcher noticed nothing, so the code of the rank is unknown.
        unfinished = [
            rank for rank, marker in enumerate(evidence.markers) if marker.get("exit") != "finished"
        ]
        who, code = f"rank {unfinished[0]}", None
    killer = f": {evidence.killer}" if evidence.killer else ""
    return f"{who} {describe_exit(code, on_full_disk=evidence.is_disk_full)}{killer}"
