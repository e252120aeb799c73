"""Threads and processes that outlive a task, and would keep its run alive after every rank has finished.

A non-daemon thread prevents its rank from exiting. A double-forked process keeps the pipe open by which
multiprocessing, and so torch elastic, notices the rank's end (``popen_fork.Popen.sentinel``).
"""

from __future__ import annotations

import os
import time

from shardscope.machine import processes
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import read_json
from shardscope.runs.verdict import is_finished_everywhere
from shardscope.runs.watch.stack_requests import REPLY_SECONDS, StackRequests

GRACE_SECONDS = 10.0
"""Time that they may run after the task has returned on every rank; SHARDSCOPE_GRACE_SECONDS overrides it."""
MAX_SECONDS = 600.0
"""Maximum time while they write: it may be an asynchronous checkpoint."""
WRITING_BYTES_PER_SECOND = 2**20
"""Write rate from which they count as writing a checkpoint."""
MAX_NAMED = 4


class LeftoverDetector:
    """Detector of leftover threads and processes of one run. Call ``check`` about once a second."""

    def __init__(self, folder: RunFolder, world_size: int) -> None:
        self.folder = folder
        self.world_size = world_size
        self.grace_seconds = read_grace_seconds()
        self.except_for: int | None = None
        """A child of the supervisor that is no part of the task, with its own descendants."""
        self.returned_at: float | None = None
        """Monotonic time at which all ranks were first seen finished; None before."""
        self._idle_since = 0.0
        self._written: dict[int, int] = {}
        self._requested_at: float | None = None
        self._stacks = StackRequests(folder, world_size)

    def has_every_rank_returned(self) -> bool:
        """Return whether the task has returned on every rank, and record when that was first true."""
        if self.returned_at is None:
            markers = ((read_json(self.folder.rank(rank)) or {}) for rank in range(self.world_size))
            # `all` stops at the first unfinished rank, so a call usually reads one small file.
            if all(is_finished_everywhere([marker]) for marker in markers):
                self.returned_at = self._idle_since = time.monotonic()
                self._written = count_written_bytes(self.except_for)
        return self.returned_at is not None

    def check(self, seconds: float, launcher: int) -> str | None:
        """Return a description of the leftovers once their time is up; None before.

        ``seconds`` have passed since the last call; ``launcher`` is the launcher's process id.
        """
        if not self.has_every_rank_returned():
            return None
        assert self.returned_at is not None
        now = time.monotonic()
        # The stacks were requested in an earlier call; the ranks need time to write them.
        if self._requested_at is not None:
            return self._describe(launcher) if now - self._requested_at >= REPLY_SECONDS else None
        # The time limit starts over while they write, up to `MAX_SECONDS`.
        before, self._written = self._written, count_written_bytes(self.except_for)
        grown = sum(count - before.get(pid, 0) for pid, count in self._written.items())
        if grown > WRITING_BYTES_PER_SECOND * seconds and now - self.returned_at < MAX_SECONDS:
            self._idle_since = now
        if now - self._idle_since >= self.grace_seconds:
            self._stacks.send()
            self._requested_at = now
        return None

    def _describe(self, launcher: int) -> str:
        """Describe ranks that did not exit and other processes; write the ranks' stacks to their logs."""
        pids = {
            rank: pid for rank in self._stacks.ranks if (pid := self._stacks.find_live_pid(rank)) is not None
        }
        # A rank's own log gets its stack, which shows the thread that is still running.
        replies = self._stacks.read_replies()
        waited = time.monotonic() - (self.returned_at or 0.0)
        message = f"the task returned {waited:.0f} s ago, and a thread is still running"
        self._stacks.write_into_logs(message, {rank: replies[rank] for rank in pids})
        # Everything else that the run started: processes that a task forked and did not wait for.
        other_processes = describe_processes({launcher, *pids.values()}, self.except_for)
        ranks = [f"rank {rank}, which a thread kept alive" for rank in pids]
        more = [f"{len(ranks) - MAX_NAMED} more ranks"] if len(ranks) > MAX_NAMED else []
        leftovers = [*ranks[:MAX_NAMED], *more, *other_processes]
        return ", ".join(leftovers) or "the launcher, which waited for a process that is gone"


def read_grace_seconds() -> float:
    """Return ``SHARDSCOPE_GRACE_SECONDS``, for uploads that take longer, or :data:`GRACE_SECONDS`."""
    try:
        return max(0.0, float(os.environ["SHARDSCOPE_GRACE_SECONDS"]))
    except (KeyError, ValueError):
        return GRACE_SECONDS


def describe_processes(exclude: set[int], except_for: int | None = None) -> list[str]:
    """Return names and ids of this process's descendants; no command lines, which may contain secrets.

    ``except_for`` is a child that is left out with its own descendants.
    """
    import psutil

    descriptions = []
    for pid in processes.list_descendants(except_for):
        try:
            child = psutil.Process(pid)
            if child.pid not in exclude and child.status() != psutil.STATUS_ZOMBIE:
                descriptions.append(f"process {child.pid} ({child.name()})")
        except psutil.Error:
            continue
    num_unnamed = len(descriptions) - MAX_NAMED
    return descriptions if num_unnamed <= 0 else [*descriptions[:MAX_NAMED], f"{num_unnamed} more processes"]


def count_written_bytes(except_for: int | None = None) -> dict[int, int]:
    """Return the bytes that each descendant of this process has passed to write(2) (proc(5), wchar).

    ``except_for`` is a child that is left out with its own descendants. Empty if the system does not count
    them.
    """
    import psutil

    num_bytes: dict[int, int] = {}
    for pid in processes.list_descendants(except_for):
        try:
            num_bytes[pid] = psutil.Process(pid).io_counters().write_chars
        except (psutil.Error, AttributeError, OSError):
            continue
    return num_bytes
