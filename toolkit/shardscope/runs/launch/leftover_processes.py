"""Threads and processes that outlive a task: they must not keep a run going after every rank has finished.

A thread that is no daemon keeps its rank from exiting; a process that was forked twice keeps the pipe by
which multiprocessing, and so torch elastic, learns that the rank is gone (``popen_fork.Popen.sentinel``).
"""

from __future__ import annotations

import os
import time

from shardscope.machine import processes
from shardscope.records.files import read_json
from shardscope.records.folder import RunFolder
from shardscope.runs.verdict import is_finished_everywhere
from shardscope.runs.watch.stack_calls import ANSWER_SECONDS, StackCalls

GRACE_SECONDS = 10.0
"""How long they may go on after the task has returned on every rank; SHARDSCOPE_GRACE_SECONDS is another."""
MAX_SECONDS = 600.0
"""How long they may go on at most while they write: an asynchronous checkpoint may be under way."""
WRITING_BYTES_PER_SECOND = 2**20
"""Less than that is no checkpoint."""
MAX_NAMED = 4


class LeftBehind:
    """One run's. ``look`` about once a second."""

    def __init__(self, folder: RunFolder, world_size: int) -> None:
        self.folder = folder
        self.world_size = world_size
        self.grace_seconds = read_grace_seconds()
        self.returned_at: float | None = None
        """When every rank was first seen finished, by the monotonic clock; None before."""
        self._idle_since = 0.0
        self._written: dict[int, int] = {}
        self._asked_at: float | None = None
        self._calls = StackCalls(folder, world_size)

    def every_rank_returned(self) -> bool:
        """Return whether the task has returned on every rank; notes the time of the first "yes"."""
        if self.returned_at is None:
            markers = ((read_json(self.folder.rank(rank)) or {}) for rank in range(self.world_size))
            # Stops at the first rank that is not finished: one small file is read per look.
            if all(is_finished_everywhere([marker]) for marker in markers):
                self.returned_at = self._idle_since = time.monotonic()
                self._written = written_bytes()
        return self.returned_at is not None

    def look(self, seconds: float, launcher: int) -> str | None:
        """Return what is left, once its time is up; None before.

        ``seconds`` have passed since the last look. ``launcher`` is its process id.
        """
        if not self.every_rank_returned():
            return None
        assert self.returned_at is not None
        now = time.monotonic()
        if self._asked_at is not None:
            return self._describe(launcher) if now - self._asked_at >= ANSWER_SECONDS else None
        before, self._written = self._written, written_bytes()
        grown = sum(count - before.get(pid, 0) for pid, count in self._written.items())
        if grown > WRITING_BYTES_PER_SECOND * seconds and now - self.returned_at < MAX_SECONDS:
            self._idle_since = now
        if now - self._idle_since >= self.grace_seconds:
            self._calls.ask()
            self._asked_at = now
        return None

    def _describe(self, launcher: int) -> str:
        """Name ranks that did not exit and other processes; the stacks of those ranks go to their logs."""
        pids = {rank: pid for rank in range(self.world_size) if (pid := self._calls.living(rank)) is not None}
        answers = self._calls.answers()
        waited = time.monotonic() - (self.returned_at or 0.0)
        what = f"the task returned {waited:.0f} s ago, and a thread goes on"
        self._calls.write_into_logs(what, {rank: answers[rank] for rank in pids})
        others = describe_processes(exclude={launcher, *pids.values()})
        ranks = [f"rank {rank}, which a thread kept alive" for rank in pids]
        more = [f"{len(ranks) - MAX_NAMED} more ranks"] * (len(ranks) > MAX_NAMED)
        named = [*ranks[:MAX_NAMED], *more, *others]
        return ", ".join(named) or "the launcher, which waited for a process that is gone"


def read_grace_seconds() -> float:
    """Return ``SHARDSCOPE_GRACE_SECONDS``, for uploads that take longer, or :data:`GRACE_SECONDS`."""
    try:
        return max(0.0, float(os.environ["SHARDSCOPE_GRACE_SECONDS"]))
    except (KeyError, ValueError):
        return GRACE_SECONDS


def describe_processes(exclude: set[int]) -> list[str]:
    """Name the descendants of this process by name and id; no command lines, which may hold secrets."""
    import psutil

    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.pid not in exclude and child.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {child.pid} ({child.name()})")
        except psutil.Error:
            continue
    return found[:MAX_NAMED] + [f"{len(found) - MAX_NAMED} more processes"] * (len(found) > MAX_NAMED)


def written_bytes() -> dict[int, int]:
    """Return the bytes that each descendant of this process has passed to write(2) (proc(5), wchar).

    Empty where the system does not count them.
    """
    import psutil

    found: dict[int, int] = {}
    for pid in processes.descendants():
        try:
            found[pid] = psutil.Process(pid).io_counters().write_chars
        except (psutil.Error, AttributeError, OSError):
            continue
    return found
