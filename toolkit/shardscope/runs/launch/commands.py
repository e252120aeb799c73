"""Commands to the ranks of a run, on whose order all ranks agree without waiting for each other.

Ranks poll the control file at their own pace. If each obeyed what it happened to see, rank 0 would leave
after step 10 and rank 1 wait for it in step 11 for ever. So at the k-th poll the first rank to come decides
how many bytes of the file count, and every other rank takes the same number at its own k-th poll.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any

from shardscope.records.files import LineTail
from shardscope.records.folder import RunFolder
from shardscope.records.regular_files import size_of

NUM_SLOTS = 1024
"""Polls whose decision is kept; no rank runs that far ahead of another."""
SLOT = struct.Struct("<qq")
"""A poll, counted from 1, and the size that was decided on."""


class PollTable:
    """The decisions of the latest polls, in memory that the ranks of one machine share.

    torch's ``FileStore`` would do, but it never forgets a key: a run of a million steps would leave 100 MB.
    """

    @staticmethod
    def make_room(descriptor: int) -> None:
        """Give a new file its size, before ranks open it. Raises ``OSError``."""
        os.ftruncate(descriptor, NUM_SLOTS * SLOT.size)

    def __init__(self, path: str) -> None:
        """Open the table at ``path``. Raises ``OSError``."""
        # Opened anew: of a descriptor that ranks inherited they would share the lock as well (flock(2)).
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._slots = mmap.mmap(self._descriptor, NUM_SLOTS * SLOT.size)

    def agree(self, poll: int, size: int) -> int:
        """Return the size that the first rank to come to ``poll`` gave; ``poll`` is counted from 1."""
        import fcntl  # Not above: Windows, where nothing is launched, has none.

        place = poll % NUM_SLOTS * SLOT.size
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            last, decided = SLOT.unpack_from(self._slots, place)
            if last == poll:
                return int(decided)
            if last < poll:
                SLOT.pack_into(self._slots, place, poll, size)
            return size
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


class CommandFeed:
    """The commands of ``control.jsonl``, the same ones at the same poll on every rank."""

    def __init__(self, folder: RunFolder, table: PollTable | None) -> None:
        """``table``: None for a rank that has nobody to agree with."""
        self._tail = LineTail(folder.control)
        self._table = table
        self._num_polls = 0

    def poll(self) -> list[dict[str, Any]]:
        """Commands that are new since the last poll. Call it equally often on every rank, once per step."""
        self._num_polls += 1
        return [
            record
            for record in self._tail.read(self._agreed_size())
            if isinstance(record.get("command"), str)
        ]

    def _agreed_size(self) -> int:
        size = size_of(self._tail.path)
        return size if self._table is None else self._table.agree(self._num_polls, size)
