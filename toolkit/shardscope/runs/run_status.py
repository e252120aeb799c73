"""Status of a run, from the transitions in its folder and whether its supervisor is alive."""

from __future__ import annotations

import contextlib
import math
import stat
import threading
import time
from pathlib import Path

from shardscope.machine.os_errors import describe_os_error, is_absent
from shardscope.machine.processes import identify_machine, is_alive
from shardscope.records.folder import FINAL, RAY, STATUSES, NodeFolder, RunFolder
from shardscope.records.folder_checks import check_transition
from shardscope.records.json_files import (
    MAX_LINES_BYTES,
    LineTail,
    read_json,
    read_json_if_present,
    read_lines,
    read_tail_text,
)
from shardscope.records.json_values import is_number
from shardscope.records.regular_files import check_regular
from shardscope.runs.backends.job_watch import JobWatch
from shardscope.runs.backends.ray.watch import RayWatch, is_streamed

START_GRACE_SECONDS = 30.0
"""Time after which a "starting" run whose supervisor has written no record counts as lost."""
MAX_SKEW_SECONDS = 3600.0
"""Difference of the clocks of two machines that is never exceeded."""
HEARTBEAT_PATIENCE_SECONDS = 30.0
"""Time without a heartbeat after which a run supervised on another machine counts as lost."""


class RunStatus:
    """Reader of one run's status; may be used from any thread."""

    def __init__(self, folder: RunFolder) -> None:
        """Read ``status.jsonl`` for the first time. Raises ``ValueError`` if it is damaged."""
        self._folder = folder
        # On several nodes the supervisor of node 0 writes the status.
        self._job: JobWatch | RayWatch | None = None
        if folder.has_nodes:
            self._job = RayWatch(folder) if (folder.path / RAY).is_dir() else JobWatch(folder)
        self._supervised = NodeFolder(folder.path, 0) if self._job is not None else folder
        self._lock = threading.Lock()
        self._records = LineTail(folder.status)
        self._last_transition: dict[str, object] = {"status": "starting", "reason": "", "time": time.time()}
        self._num_transitions = 0
        self._heartbeat = (0.0, time.monotonic())
        self._seen = time.monotonic()
        """Monotonic time at which the last transition was read."""
        self._read_first_records()

    def read(self) -> dict[str, object]:
        """Return the last transition, or "lost" if no supervisor is left to write the next one."""
        with self._lock:
            self._read_records()
            # A final status stays, whatever happened to the supervisor since.
            if self._last_transition["status"] in FINAL:
                return self._last_transition
            try:
                if isinstance(self._job, RayWatch):
                    by_stream = self._job.describe_stream(self._last_transition)
                    if by_stream is not None:
                        return by_stream
                if self._job is not None and self._is_waiting():
                    # The first reason is the launch's: "being submitted".
                    is_again = self._last_transition["status"] == "queued" and self._num_transitions > 1
                    recorded = str(self._last_transition["reason"]) if is_again else ""
                    return self._job.describe(self._find_age(), recorded) or self._last_transition
                reason = self._explain_lost_supervisor()
                if reason is not None and isinstance(self._job, RayWatch):
                    by_ray = self._job.describe_without_lead()
                    self._read_records()  # The run may have ended normally between the checks.
                    if by_ray is not None and self._last_transition["status"] not in FINAL:
                        return self._conclude(by_ray)
                elif reason is not None and isinstance(self._job, JobWatch):
                    by_job = self._job.describe_without_lead(self._folder.attempt)
                    if by_job is not None:
                        return by_job if "status" in by_job else {**self._last_transition, **by_job}
            except OSError as error:
                return self._mark_outdated(error)
            if reason is None:
                return (
                    self._last_transition
                    if self._records.unreadable is None
                    else self._mark_outdated(self._records.unreadable)
                )
            self._read_records()  # The run may have ended normally between the two checks.
            return (
                self._last_transition
                if self._last_transition["status"] in FINAL
                else self._conclude({"status": "lost", "reason": reason})
            )

    def read_history(self) -> list[dict[str, object]]:
        """Return all statuses so far, oldest first, each with its ``time``, ``status`` and ``reason``."""
        records = [record for record in read_lines(self._folder.status) if _is_transition(record)]
        state = self.read()
        is_recorded = bool(records) and records[-1].get("status") in FINAL
        if state["status"] in FINAL and not is_recorded and "time" in state:
            records.append(state)  # The end of a job that no node has begun.
        elif state["status"] == "lost":
            try:
                part = next(iter(self._folder.list_nodes()), self._folder)
                last_heartbeat: float | None = part.supervisor.stat().st_mtime
            except OSError:
                last_heartbeat = None
            records.append({**state, "time": last_heartbeat})
        return [{key: record.get(key) for key in ("time", "status", "reason")} for record in records]

    def _conclude(self, end: dict[str, object]) -> dict[str, object]:
        """Return the end of a run whose nodes recorded none, and delete its task in place of a node.

        On one machine the lease of the run's launcher does.
        """
        if self._job is not None and end["status"] in FINAL:
            with contextlib.suppress(OSError):  # Another user reads it.
                self._folder.task.unlink(missing_ok=True)
        return end

    def _is_waiting(self) -> bool:
        """Return whether no node has started (again).

        Raises ``OSError`` if the folder cannot be read now.
        """
        if not _is_folder(self._folder.path):
            return False
        is_queued = self._last_transition["status"] == "queued"
        return is_queued or read_json_if_present(self._supervised.supervisor) is None

    def _mark_outdated(self, error: OSError) -> dict[str, object]:
        """Return the last known status, with ``error`` as the reason why it may be outdated."""
        cause = describe_os_error(error)
        notice = f"status possibly outdated: the run's files or processes cannot be read now, {cause}"
        reason = str(self._last_transition["reason"] or "")
        return {**self._last_transition, "reason": f"{reason}; {notice}" if reason else notice}

    def _read_first_records(self) -> None:
        """Read ``status.jsonl`` for the first time. Raises ``ValueError`` if it is damaged."""
        check_regular(self._folder.status)
        records = self._records.read(MAX_LINES_BYTES)
        if self._records.num_malformed and not records:
            raise ValueError(f"{self._folder.status} is damaged: no line of it is a JSON object.")
        for record in records:
            if "status" in record:
                check_transition(self._folder, record)
                self._last_transition = {"reason": "", **record}
                self._num_transitions += 1

    def _read_records(self) -> None:
        for record in self._records.read(MAX_LINES_BYTES):
            if _is_transition(record):
                self._last_transition, self._seen = {"reason": "", **record}, time.monotonic()
                self._num_transitions += 1

    def _explain_lost_supervisor(self) -> str | None:
        """Return why the supervisor is gone, or None if it is alive.

        Raises ``OSError`` if the folder or the process table cannot be read now.
        """
        if not _is_folder(self._folder.path):
            return "its folder is gone"
        record = read_json_if_present(self._supervised.supervisor) or {}
        pid = record.get("pid")
        # No valid record yet: the supervisor is still starting, or died before it could write one.
        if record.get("started") is None or not isinstance(pid, int) or not 0 < pid < 2**31:
            return "its supervisor never started" if self._find_age() > START_GRACE_SECONDS else None
        # On this machine the process itself can be checked; on another one only its heartbeat is visible.
        # Of a streamed run the files arrive after the processes that wrote them have ended.
        if record.get("machine") == identify_machine() and not is_streamed(self._folder):
            started = record["started"]
            if isinstance(started, int | float) and is_alive(pid, started):
                return None
        elif not self._has_lost_heartbeat():
            return None
        output = read_tail_text(self._supervised.supervisor_log, 500).strip()
        reason = (
            f"its supervisor (process {pid}) is gone without a final status: killed, or the machine restarted"
        )
        return f"{reason}. Its log: {output}" if output else reason

    def _find_age(self) -> float:
        """Return the seconds since the last transition.

        Of a run that was launched on another machine, whose clock may differ by minutes, only those since
        this reader has seen it, unless its time is an hour ago.
        """
        since = self._last_transition.get("time")
        age = time.time() - since if is_number(since) else math.inf
        machine = (read_json(self._folder.run_json) or {}).get("machine")
        is_ours = machine is None or machine == identify_machine()
        return age if is_ours or age > MAX_SKEW_SECONDS else time.monotonic() - self._seen

    def _has_lost_heartbeat(self) -> bool:
        """Return whether the heartbeat is older than ``HEARTBEAT_PATIENCE_SECONDS``.

        The age is measured with our own monotonic clock: the clocks of two machines may differ.
        """
        try:
            beat = self._supervised.supervisor.stat().st_mtime
        except OSError as error:
            if is_absent(error):
                return True
            raise
        if beat != self._heartbeat[0]:
            self._heartbeat = (beat, time.monotonic())
        return time.monotonic() - self._heartbeat[1] > HEARTBEAT_PATIENCE_SECONDS


def _is_transition(record: dict[str, object]) -> bool:
    """Return whether a line of ``status.jsonl`` has a valid status."""
    status = record.get("status")
    return isinstance(status, str) and status in STATUSES


def _is_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder. Raises ``OSError`` if it cannot be read now."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        if is_absent(error):
            return False
        raise
