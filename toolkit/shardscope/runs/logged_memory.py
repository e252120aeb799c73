"""What each rank logged of its memory: the latest and the highest, of runs of any length.

Lines are searched, not parsed: of a million only the latest becomes a record, and none is kept.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from shardscope.runs.folder import RunFolder

PIECE_BYTES = 2**22
"""Read at a time."""
# As ``records.encode`` writes it. In a value that is text the quotes of such words have backslashes.
_NUMBER = re.compile(rb'"(peak_)?memory_bytes": (\d+)(?=[,}])')


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
        self.path = path
        self.latest: dict[str, Any] = {}
        """The latest line with any such number."""
        self.now: int | None = None
        self.highest = 0
        self._offset = 0

    def go_on(self) -> None:
        """Take in what was appended, in pieces of whole lines."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    # Replaced by a shorter file: somebody restored or copied the folder.
                    self.latest, self.now, self.highest, self._offset = {}, None, 0, 0
                file.seek(self._offset)
                rest = b""
                while piece := file.read(PIECE_BYTES):
                    lines, newline, rest = (rest + piece).rpartition(b"\n")
                    self._offset += len(lines) + len(newline)
                    self._take(lines)
        except OSError:  # The folder may be gone, or the rank has logged nothing yet.
            return

    def _take(self, lines: bytes) -> None:
        last = None
        for last in _NUMBER.finditer(lines):
            number = int(last[2])
            self.highest = max(self.highest, number)
            if last[1] is None:
                self.now = number
        if last is not None:
            start, end = lines.rfind(b"\n", 0, last.start()) + 1, lines.find(b"\n", last.end())
            self.latest = json.loads(lines[start : end if end >= 0 else None].decode(errors="replace"))
