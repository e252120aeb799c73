"""Hang detection for tasks that log no steps: no output, CPU time or file access, and unchanged stacks.

``hang.py`` covers tasks that log steps. Without a step time as the scale, all of these signs must hold for
ten minutes, or for one if a rank has returned from the task and another waits in torch. A rank that uses
CPU time is never reported, although it may spin forever (or the GPU driver for it): nothing visible from
outside distinguishes that from real work.

- Its stack does not: one library call (a decomposition, a compiler, a tokenizer over a corpus) may stay at
  one line for hours, and so may a loop over such calls.
- Its variables do not: only bytes behind them may change.
- Other ranks waiting in a collective do not: rank 0 may be preparing data for them.

A false alarm would teach users to ignore a true one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardscope.records.folder import RunFolder
from shardscope.records.regular_files import size_of
from shardscope.runs.watch.hang import BUSY_FACTOR, MAX_GAP_SECONDS, read_hang_seconds
from shardscope.runs.watch.hang_reports import HangReport, build_report, describe_hang
from shardscope.runs.watch.stack_requests import NO_STACKS, REPLY_SECONDS, StackRequests
from shardscope.runs.watch.stacks import find_delay_reason, parse_main_thread

QUIET_FACTOR = 10.0
"""Factor on the minimum hang time of ``hang.py``."""
NUM_SAMPLES = 60
"""Number of activity samples before a standstill is reported."""
CPU_SHARE = 0.02
"""Share of one core that waiting threads use, for a rank and its child processes."""
FILE_BYTES = 2**20
"""Bytes read or written between two samples below which a rank counts as idle; a data loader moves more."""


class Activity(NamedTuple):
    """Cumulative activity of one rank."""

    cpu_seconds: float
    """CPU time of the rank and its child processes, including children that it has reaped."""
    file_bytes: int
    printed_bytes: int


class StandstillDetector:
    """Standstill detector of one run. Call ``check`` once a second."""

    def __init__(self, folder: RunFolder, world_size: int, *, quiet_seconds: float | None = None) -> None:
        self.folder = folder
        self.quiet_seconds = QUIET_FACTOR * read_hang_seconds() if quiet_seconds is None else quiet_seconds
        self.hangs = False
        """Whether a standstill was reported and nothing has moved since."""
        self.report: HangReport | None = None
        """Where the ranks stand in a standstill."""
        self._stacks = StackRequests(folder, world_size)
        self._before: dict[int, Activity] = {}
        self._since_sample = 0.0
        self._quiet_so_far = 0.0
        self._stacks_at_half: Mapping[int, str] | None = None
        """Stacks at half of the time limit; None before."""
        self._seconds_since_request: float | None = None
        self._limit = self.quiet_seconds
        self._may_miss_returned = True
        """Whether ranks may wait for one that has returned: as long as no stacks say otherwise."""

    def check(
        self, new: Mapping[int, Sequence[Mapping[str, object]]], seconds: float, *, has_steps: bool
    ) -> str | None:
        """Return a message when a standstill begins or ends, else None.

        ``new`` are the new records by rank, ``seconds`` the time since the last call. With ``has_steps`` the
        step-based detector is responsible, and this one only resets itself.
        """
        self._since_sample += min(seconds, MAX_GAP_SECONDS)
        if self._seconds_since_request is not None:
            self._seconds_since_request += seconds
            if self._seconds_since_request >= REPLY_SECONDS:
                self._seconds_since_request = None
                replies = self._stacks.read_replies()
                return self._judge({rank: replies[rank] for rank in self._before})  # Skip ended ranks.
        if has_steps or any(new.values()):
            self._before = {}
            return self._reset()
        # Compare activity samples; any change restarts the clock.
        if self._since_sample < self.quiet_seconds / NUM_SAMPLES:
            return None
        seconds, self._since_sample = self._since_sample, 0.0
        before, self._before = self._before, self._read_activity()
        if not self._is_still(before, seconds):
            return self._reset()
        self._quiet_so_far += seconds
        # Request the stacks twice, at half of the limit and at the limit: both must be the same.
        if not self.hangs and self._seconds_since_request is None:
            # With unequal numbers of steps the others wait for a rank that has returned.
            is_short = self._may_miss_returned and self._stacks.list_returned()
            limit = self._limit / QUIET_FACTOR if is_short else self._limit
            half_way = self._stacks_at_half is None and self._quiet_so_far >= limit / 2
            if half_way or self._quiet_so_far >= limit:
                self._stacks.send()
                self._seconds_since_request = 0.0
        return None

    def _is_still(self, before: Mapping[int, Activity], seconds: float) -> bool:
        # A rank has come or gone.
        if not self._before or self._before.keys() != before.keys():
            return False
        return all(
            now.cpu_seconds - before[rank].cpu_seconds <= CPU_SHARE * seconds
            and now.file_bytes - before[rank].file_bytes < FILE_BYTES
            and now.printed_bytes == before[rank].printed_bytes
            for rank, now in self._before.items()
        )

    def _reset(self) -> str | None:
        self._quiet_so_far, self._limit = 0.0, self.quiet_seconds
        self._stacks_at_half, self._seconds_since_request, self.report = None, None, None
        self._may_miss_returned = True
        if not self.hangs:
            return None
        self.hangs = False
        return "activity is seen again"

    def _judge(self, replies: Mapping[int, str]) -> str | None:
        # The first of two requests, at half of the limit: only remember the stacks.
        earlier, self._stacks_at_half = self._stacks_at_half, replies
        if earlier is None:
            return None
        if any(
            reply in NO_STACKS or _get_position(earlier.get(rank, "")) != _get_position(reply)
            for rank, reply in replies.items()
        ):
            return self._reset()
        # A checkpoint to a slow file system may look still, too: extend the limit, once.
        if any(map(find_delay_reason, replies.values())) and self._limit == self.quiet_seconds:
            self._limit = BUSY_FACTOR * self.quiet_seconds
            return None
        # The last rank may as well wait for a server or a program of its own.
        if self._quiet_so_far < self._limit and not any(map(_waits_in_torch, replies.values())):
            self._may_miss_returned = False
            return None
        self.hangs = True
        message = f"no activity for {self._quiet_so_far:.0f} s"
        self._stacks.write_into_logs(message, replies)
        for rank, activity in self._before.items():  # The lines that we added to its log are not activity.
            self._before[rank] = activity._replace(printed_bytes=self._count_printed(rank))
        returned = self._stacks.list_returned()
        self.report = build_report(
            "activity", replies, hangs=True, waited=self._quiet_so_far, returned=returned
        )
        return describe_hang(self.report)

    def _read_activity(self) -> dict[int, Activity]:
        activity = {}
        for rank in self._stacks.ranks:
            pid = self._stacks.find_live_pid(rank)
            if pid is not None:
                activity[rank] = Activity(
                    _read_cpu_seconds(pid), _read_file_bytes(pid), self._count_printed(rank)
                )
        return activity

    def _count_printed(self, rank: int) -> int:
        return size_of(self.folder.log(rank))


def _waits_in_torch(stacks: str) -> bool:
    """Return whether the main thread is in torch, as in a collective or in a backward that calls one."""
    frames = parse_main_thread(stacks)
    return bool(frames) and "/torch/" in frames[0][0]


def _get_position(stacks: str) -> Sequence[object]:
    return parse_main_thread(stacks) or stacks


def _read_cpu_seconds(pid: int) -> float:
    import psutil

    try:
        process = psutil.Process(pid)
        tree = (process, *process.children(recursive=True))
        return sum(sum(process.cpu_times()[:4]) for process in tree)
    except psutil.Error:  # A process just ended: the next sample will differ, which counts as activity.
        return 0.0


def _read_file_bytes(pid: int) -> int:
    """Return the bytes passed to read and write calls, cached or not (proc(5), io); 0 if unknown."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "wchar:")))
