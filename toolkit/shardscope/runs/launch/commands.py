"""Commands to the ranks of a run, received by all ranks at the same step without a barrier.

Ranks poll the control file at their own pace. If each obeyed the commands it happened to see, rank 0 might
stop after step 10 and rank 1 wait for it in step 11 forever. So the first rank at the k-th poll decides how
many bytes of the file count, and every other rank uses the same number at its own k-th poll.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from shardscope.records.attempts import is_for_attempt, read_control_bytes
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import LineTail
from shardscope.records.regular_files import open_to_read, size_of

NUM_SLOTS = 1024
"""Number of polls whose decision is kept; no rank runs that far ahead of another."""
VISIBLE_SECONDS = 90.0
"""Maximum wait for a command that another node has read."""
SLOT = struct.Struct("<qq")
"""A decision: the number of the poll, from 1, and the file size in bytes."""


class PollTable:
    """The decisions of the latest polls, in memory shared by the ranks of one machine.

    torch's ``FileStore`` would work, but its file only grows: a million steps would leave 100 MB.
    """

    @staticmethod
    def allocate(descriptor: int) -> None:
        """Set the size of a new file before ranks open it. Raises ``OSError``."""
        os.ftruncate(descriptor, NUM_SLOTS * SLOT.size)

    def __init__(self, path: str, agree_with_nodes: Callable[[int, int], int] | None = None) -> None:
        """Open the table at ``path``. Raises ``OSError``.

        ``agree_with_nodes(poll, size)`` returns the size on which the nodes of a run agree; None: one node.
        """
        self._agree_with_nodes = agree_with_nodes
        # Each rank opens the file itself: an inherited descriptor would share its lock (flock(2)).
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._slots = mmap.mmap(self._descriptor, NUM_SLOTS * SLOT.size)

    def agree_on_size(self, poll: int, size: int) -> int:
        """Return the ``size`` given by the first rank that reached ``poll`` (counted from 1)."""
        import fcntl  # Imported lazily: this module is also imported on Windows, which has no fcntl.

        offset = poll % NUM_SLOTS * SLOT.size
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            last, decided = SLOT.unpack_from(self._slots, offset)
            if last == poll:  # Another rank was first.
                return int(decided)
            # The slot holds an older poll, or (for a rank NUM_SLOTS behind) a newer one, which stays.
            if last < poll:
                if self._agree_with_nodes is not None:
                    size = self._agree_with_nodes(poll, size)
                SLOT.pack_into(self._slots, offset, poll, size)
            return size
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


class CommandFeed:
    """Reader of ``control.jsonl`` that returns the same commands at the same poll on every rank."""

    def __init__(self, folder: RunFolder, table: PollTable | None) -> None:
        """Open the feed. ``table`` is None for a single rank, which needs no agreement."""
        self._folder = folder
        self._tail = LineTail(folder.control)
        self._tail.offset = read_control_bytes(folder)
        self._table = table
        self._num_polls = 0

    def poll(self) -> list[dict[str, object]]:
        """Return the new commands since the last poll. Call it equally often on every rank, once per step."""
        self._num_polls += 1
        return [
            record
            for record in self._tail.read(self._agree_on_size())
            if isinstance(record.get("command"), str) and is_for_attempt(record, self._folder)
        ]

    def _agree_on_size(self) -> int:
        size = size_of(self._tail.path)
        if self._table is None:
            return size
        decided = self._table.agree_on_size(self._num_polls, size)
        if decided > size:  # Another node saw a line that is not visible here yet.
            wait_for_size(self._tail.path, decided)
        return decided


def wait_for_size(path: Path, size: int) -> None:
    """Wait until ``path`` has ``size`` bytes here, at most ``VISIBLE_SECONDS``.

    An NFS client caches a file's attributes for up to a minute (nfs(5), acregmax), but reads them anew when
    the file is opened.
    """
    deadline = time.monotonic() + VISIBLE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), open_to_read(path) as file:
            if os.fstat(file.fileno()).st_size >= size:
                return
        time.sleep(0.01)
