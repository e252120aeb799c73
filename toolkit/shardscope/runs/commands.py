"""Commands to the ranks of a run, on whose order all ranks agree without waiting for each other.

Ranks poll the control file at their own pace. If each obeyed what it happened to see, rank 0 would leave
after step 10 and rank 1 wait for it in step 11 for ever. So at the k-th poll the first rank to come decides
how many bytes of the file count, and every other rank takes the same number at its own k-th poll.
"""

from __future__ import annotations

from typing import Any, Protocol

from shardscope.runs.folder import RunFolder
from shardscope.runs.records import LineTail

FORGET_AFTER = 1000
"""Polls after which a decision is deleted; no rank runs that far ahead of another."""


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used here."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def delete_key(self, key: str, /) -> bool: ...


class CommandFeed:
    """The commands of ``control.jsonl``, the same ones at the same poll on every rank."""

    def __init__(self, folder: RunFolder, store: Store, *, rank: int, world_size: int) -> None:
        self._tail = LineTail(folder.control)
        self._store = store
        self._rank = rank
        self._world_size = world_size
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
        size = self._size()
        if self._world_size == 1:
            return size
        key = f"poll/{self._num_polls}"
        agreed = int(self._store.compare_set(key, "", str(size)))
        if self._rank == 0 and self._num_polls > FORGET_AFTER:
            self._store.delete_key(f"poll/{self._num_polls - FORGET_AFTER}")
        return agreed

    def _size(self) -> int:
        try:
            return self._tail.path.stat().st_size
        except OSError:
            return 0
