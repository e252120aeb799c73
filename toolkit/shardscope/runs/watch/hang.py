"""Hang detection from logged steps: no step for many times the median step time, and no other explanation.

``standstill.py`` covers tasks that log no steps. Start-up and the first steps, which compile and allocate,
are not judged: there is no median yet. Before a hang is reported, the Python stacks of all ranks are
requested; a rank that saves a checkpoint, compiles or writes a trace gets more time. So does every rank on a
full disk, where stacks may be lost.
"""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import read_json
from shardscope.runs.watch.hang_reports import HangReport, build_report, describe_hang
from shardscope.runs.watch.stack_requests import REPLY_SECONDS, StackRequests
from shardscope.runs.watch.stacks import find_delay_reason

MAX_MEDIANS = 20.0
"""A step that takes longer than this many medians is examined."""
MIN_HANG_SECONDS = 60.0
"""Minimum time before a step is examined: a slow disk, data loader or other process may cost seconds."""
BUSY_FACTOR = 10.0
"""Factor on the limit for a rank whose stack explains the delay, such as a checkpoint."""
MIN_STEPS = 5
"""Minimum number of step times for a median."""
MAX_GAP_SECONDS = 5.0
"""Maximum time counted between two checks: a longer gap (a suspended machine) stopped the ranks as well."""


@dataclass
class Progress:
    """Step progress of one rank."""

    step: int = -1
    time: float | None = None
    """Time at which the rank logged that step, epoch seconds."""
    still_seconds: float = 0.0
    """Seconds since the supervisor read the rank's last record."""
    silent_seconds: float = 0.0
    """Seconds since the rank last tried to write a record; fewer than ``still_seconds`` if it loses them."""
    touched_ns: int | None = None
    """Modification time of the rank's metrics, which it also sets when it loses a record."""
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    """Seconds between the latest steps."""

    def add_records(self, records: Sequence[Mapping[str, object]]) -> bool:
        """Process new records of the rank. Return whether there were any, also of the same step."""
        for record in records:
            step, time = record.get("step"), record.get("time")
            # Several records of one step (training and evaluation, say) are one step.
            if not isinstance(step, int) or not isinstance(time, int | float) or step == self.step:
                continue
            # A smaller step is also progress: a task may restart its count in each epoch.
            if self.time is not None and time >= self.time:
                self.step_seconds.append(time - self.time)
            self.step, self.time = step, float(time)
        return bool(records)

    def add_seconds(self, seconds: float, touched_ns: int | None, *, has_records: bool) -> None:
        """Add the time since the last check; ``touched_ns`` is the present modification time."""
        is_silent = not has_records and touched_ns == self.touched_ns
        self.still_seconds = 0.0 if has_records else self.still_seconds + seconds
        self.silent_seconds = self.silent_seconds + seconds if is_silent else 0.0
        self.touched_ns = touched_ns

    @property
    def median_seconds(self) -> float | None:
        """Median seconds per step; None while fewer than ``MIN_STEPS`` are known."""
        return statistics.median(self.step_seconds) if len(self.step_seconds) >= MIN_STEPS else None

    @property
    def loses_records(self) -> bool:
        """Return whether the rank has gone on, for most of the time without a record."""
        return self.silent_seconds < self.still_seconds / 2


class HangDetector:
    """Hang detector of one run. Call ``check`` once a second with the new records of all ranks."""

    def __init__(self, folder: RunFolder, world_size: int, *, least_seconds: float | None = None) -> None:
        self.folder = folder
        self.least_seconds = read_hang_seconds() if least_seconds is None else least_seconds
        self.ranks = {rank: Progress() for rank in folder.select_ranks(world_size)}
        self.hangs = False
        """Whether a hang was reported and no step was logged since."""
        self.report: HangReport | None = None
        """Where the ranks stand since they were examined; None once a step is logged."""
        self._has_reported_losses = False
        """Whether lost records were reported since the last step or hang."""
        self._seconds_since_request: float | None = None
        self._next_request_after = 0.0
        self._stacks = StackRequests(folder, world_size)

    def check(self, new: Mapping[int, Sequence[Mapping[str, object]]], seconds: float) -> str | None:
        """Return a message when a hang begins or ends, else None.

        ``new`` are the new records by rank, ``seconds`` the time since the last call.
        """
        # Find the ranks that are past their limit and have not exited.
        moved = {rank for rank, records in new.items() if self.ranks[rank].add_records(records)}
        for rank, progress in self.ranks.items():
            touched_ns = _read_modified_ns(self.folder.events(rank))
            progress.add_seconds(min(seconds, MAX_GAP_SECONDS), touched_ns, has_records=rank in moved)
        still = {rank: self.ranks[rank] for rank in self.ranks if self._is_still(rank)}
        if not still:
            return self._recover()
        # Without space or quota, metrics are lost, and the ranks may well train on. Stacks may be lost as
        # well, and with them the reason for a delay: on a full disk each rank gets the time of a busy one.
        is_full = self.folder.is_on_full_disk
        factor = BUSY_FACTOR if is_full and not self.hangs else 1.0
        silent = {
            rank: progress
            for rank, progress in still.items()
            if progress.silent_seconds > factor * self._compute_limit(progress)
        }
        if not silent:
            return self._report_losses(still, is_full=is_full)
        waited = max(progress.silent_seconds for progress in silent.values())
        if self.hangs or waited < self._next_request_after:
            return None
        # Request the stacks, and judge them a second later, once the ranks have written them.
        if self._seconds_since_request is None:
            self._stacks.send()
            self._seconds_since_request = 0.0
            return None
        self._seconds_since_request += seconds
        if self._seconds_since_request < REPLY_SECONDS:
            return None
        self._seconds_since_request = None
        return self._judge(silent, waited)

    @property
    def has_steps(self) -> bool:
        """Return whether any rank has logged enough steps to be judged."""
        return any(progress.median_seconds is not None for progress in self.ranks.values())

    def _is_still(self, rank: int) -> bool:
        progress = self.ranks[rank]
        if progress.median_seconds is None or progress.still_seconds <= self._compute_limit(progress):
            return False
        # A rank whose task has returned or failed logs no more steps.
        return "exit" not in (read_json(self.folder.rank(rank)) or {})

    def _compute_limit(self, progress: Progress) -> float:
        return max(self.least_seconds, MAX_MEDIANS * (progress.median_seconds or 0.0))

    def _report_losses(self, still: Mapping[int, Progress], *, is_full: bool) -> str | None:
        """Return a message, once, if metrics of the ranks ``still`` are lost, or may be on a full disk."""
        self._seconds_since_request = None
        train_on = all(progress.loses_records for progress in still.values())
        if not is_full and not train_on:
            return None
        if self.hangs:
            self.hangs, self.report = False, None
        elif self._has_reported_losses:
            return None
        self._has_reported_losses = True
        if not is_full:
            return (
                f"no step is recorded, because metrics cannot be written to {self.folder.path}. The ranks "
                "train on. Nearest fix: look for the error in their logs, such as a quota that is used up"
            )
        going_on = "the ranks train on" if train_on else "whether the ranks train on is not known"
        return (
            f"no step is recorded, because the disk of {self.folder.path} is full. Metrics and output are "
            f"lost, and {going_on}. Nearest fix: free some space on that disk"
        )

    def _recover(self) -> str | None:
        self._next_request_after, self._seconds_since_request = 0.0, None
        self.report = None
        if not self.hangs and not self._has_reported_losses:
            return None
        self.hangs = self._has_reported_losses = False
        return "steps are logged again"

    def _judge(self, still: Mapping[int, Progress], waited: float) -> str | None:
        # One busy rank explains the others: they wait for it in a collective.
        replies = self._stacks.read_replies()
        busy = {rank: reason for rank, reply in replies.items() if (reason := find_delay_reason(reply))}
        limit = max(map(self._compute_limit, still.values()))
        self.report = build_report(
            "steps",
            replies,
            hangs=False,
            waited=waited,
            median=statistics.median(progress.median_seconds or 0.0 for progress in still.values()),
            steps={rank: progress.step for rank, progress in self.ranks.items() if progress.step >= 0},
            busy=busy,
            returned=self._stacks.list_returned(),
        )
        # Look again after twice the time: each request interrupts the ranks for a moment.
        if busy and waited < BUSY_FACTOR * limit:
            self._next_request_after = min(2 * waited, BUSY_FACTOR * limit)
            return None
        self.hangs, self._has_reported_losses = True, False
        self._stacks.write_into_logs(f"no step for {waited:.0f} s", replies)
        self.report = self.report._replace(hangs=True)
        return describe_hang(self.report)


def _read_modified_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def read_hang_seconds() -> float:
    """Return ``SHARDSCOPE_HANG_SECONDS``, for tasks with long pauses, or ``MIN_HANG_SECONDS``."""
    try:
        return max(0.1, float(os.environ["SHARDSCOPE_HANG_SECONDS"]))
    except (KeyError, ValueError):
        return MIN_HANG_SECONDS
