"""Hang detection from logged steps: no step for many times the median step time, and no other explanation.

``standstill.py`` covers tasks that log no steps. Start-up and the first steps, which compile and allocate,
are not judged: there is no median yet. Before a hang is reported, the Python stacks of all ranks are
requested; a rank that saves a checkpoint, compiles or writes a trace gets more time.
"""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
        if records:
            self.still_seconds = 0.0
        return bool(records)

    @property
    def median_seconds(self) -> float | None:
        """Median seconds per step; None while fewer than ``MIN_STEPS`` are known."""
        return statistics.median(self.step_seconds) if len(self.step_seconds) >= MIN_STEPS else None


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
        self._has_reported_full_disk = False
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
            if rank not in moved:
                progress.still_seconds += min(seconds, MAX_GAP_SECONDS)
        still = {rank: self.ranks[rank] for rank in self.ranks if self._is_still(rank)}
        if not still:
            return self._recover()
        # On a full disk lines of metrics are lost, and stacks would be too: the ranks may well train on.
        if not self.hangs and self.folder.is_on_full_disk:
            return self._report_full_disk()
        waited = max(progress.still_seconds for progress in still.values())
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
        return self._judge(still, waited)

    @property
    def has_steps(self) -> bool:
        """Return whether any rank has logged enough steps to be judged."""
        return any(progress.median_seconds is not None for progress in self.ranks.values())

    def _is_still(self, rank: int) -> bool:
        progress = self.ranks[rank]
        median = progress.median_seconds
        if median is None or progress.still_seconds <= max(self.least_seconds, MAX_MEDIANS * median):
            return False
        # A rank whose task has returned or failed logs no more steps.
        return "exit" not in (read_json(self.folder.rank(rank)) or {})

    def _report_full_disk(self) -> str | None:
        self._seconds_since_request = None
        if self._has_reported_full_disk:
            return None
        self._has_reported_full_disk = True
        return (
            f"no step is recorded, because the disk of {self.folder.path} is full. Metrics and output are "
            "lost, and whether the ranks train on is not known. Nearest fix: free some space on that disk"
        )

    def _recover(self) -> str | None:
        self._next_request_after, self._seconds_since_request = 0.0, None
        self.report = None
        if not self.hangs and not self._has_reported_full_disk:
            return None
        self.hangs = self._has_reported_full_disk = False
        return "steps are logged again"

    def _judge(self, still: Mapping[int, Progress], waited: float) -> str | None:
        # One busy rank explains the others: they wait for it in a collective.
        replies = self._stacks.read_replies()
        busy = {rank: reason for rank, reply in replies.items() if (reason := find_delay_reason(reply))}
        slowest_median = max(progress.median_seconds or 0.0 for progress in still.values())
        limit = max(self.least_seconds, MAX_MEDIANS * slowest_median)
        self.report = build_report(
            "steps",
            replies,
            hangs=False,
            waited=waited,
            median=statistics.median(progress.median_seconds or 0.0 for progress in still.values()),
            steps={rank: progress.step for rank, progress in self.ranks.items() if progress.step >= 0},
            busy=busy,
        )
        # Look again after twice the time: each request interrupts the ranks for a moment.
        if busy and waited < BUSY_FACTOR * limit:
            self._next_request_after = min(2 * waited, BUSY_FACTOR * limit)
            return None
        self.hangs = True
        self._stacks.write_into_logs(f"no step for {waited:.0f} s", replies)
        self.report = self.report._replace(hangs=True)
        return describe_hang(self.report)


def read_hang_seconds() -> float:
    """Return ``SHARDSCOPE_HANG_SECONDS``, for tasks with long pauses, or ``MIN_HANG_SECONDS``."""
    try:
        return max(0.1, float(os.environ["SHARDSCOPE_HANG_SECONDS"]))
    except (KeyError, ValueError):
        return MIN_HANG_SECONDS
