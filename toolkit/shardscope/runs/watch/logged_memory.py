"""What each rank logged of its memory: the latest and the highest, of runs of any length.

Lines are searched, not parsed: of a million only the latest becomes a record, and none is kept.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shardscope.records.files import LineTail, parse_lines
from shardscope.records.folder import RunFolder

# As ``records.encode`` writes it. In a value that is text the quotes of such words have backslashes.
_NUMBER = re.compile(rb'"(peak_)?memory_bytes": (\d{1,17})(?=[,}])')


class LoggedMemory:
    """One run's; each :meth:`read` goes on where the one before ended. Not for several threads."""

    def __init__(self, folder: RunFolder, world_size: int) -> None:
        self._ranks = [_RankLines(folder.events(rank)) for rank in range(world_size)]

    def read(self) -> list[dict[str, Any]]:
        """Per rank that logged any: rank, step, time, memory_bytes (latest) and peak_memory_bytes (highest).

        ``memory_bytes`` is None where only peaks were logged.
        """
        for rank in self._ranks:
            rank.go_on()
        return [
            {
                "rank": number,
                "memory_bytes": rank.now,
                "step": rank.latest.get("step"),
                "time": rank.latest.get("time"),
                "peak_memory_bytes": rank.highest,
            }
            for number, rank in enumerate(self._ranks)
            if rank.latest
        ]


class _RankLines:
    """One rank's file, as far as it was read."""

    def __init__(self, path: Path) -> None:
        self.latest: dict[str, Any] = {}
        """The latest line with any such number."""
        self.now: int | None = None
        self.highest = 0
        self._tail = LineTail(path)
        self._num_restarts = 0

    def go_on(self) -> None:
        """Take in what was appended, in pieces of whole lines."""
        for lines in self._tail.pieces():
            if self._tail.num_restarts != self._num_restarts:
                self._num_restarts = self._tail.num_restarts
                self.latest, self.now, self.highest = {}, None, 0
            self._take(lines)

    def _take(self, lines: bytes) -> None:
        last = None
        for last in _NUMBER.finditer(lines):
            number = int(last[2])
            self.highest = max(self.highest, number)
            if last[1] is None:
                self.now = number
        if last is not None:
            start, end = lines.rfind(b"\n", 0, last.start()) + 1, lines.find(b"\n", last.end())
            found = parse_lines(lines[start : end if end >= 0 else None]).records
            self.latest = found[0] if found else self.latest
