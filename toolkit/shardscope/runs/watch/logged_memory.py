"""Latest and highest logged memory of each rank, for runs of any length.

Lines are searched with a regular expression: only the latest is parsed as JSON, and none is kept.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypedDict

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import LineTail, parse_lines

# Matches the output of ``records.encode``. Inside a text value the quotes would be escaped, so none matches.
_NUMBER = re.compile(rb'"(peak_)?memory_bytes": (\d{1,17})(?=[,}])')


class LoggedPeak(TypedDict):
    """The memory that one rank has logged so far."""

    rank: int
    memory_bytes: int | None
    """Latest bytes; None if only peaks were logged."""
    step: object
    """Step and time (epoch seconds) of the latest record, as logged."""
    time: object
    peak_memory_bytes: int
    """Highest bytes."""


class LoggedMemory:
    """Incremental reader of one run's logged memory. Not thread-safe."""

    def __init__(self, folder: RunFolder, world_size: int) -> None:
        self._ranks = [_RankLines(folder.events(rank)) for rank in range(world_size)]

    def read(self) -> list[LoggedPeak]:
        """Read new lines. Return one record per rank that logged memory so far."""
        for rank in self._ranks:
            rank.read_new_lines()
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
    """Incremental reader of one rank's file."""

    def __init__(self, path: Path) -> None:
        self.latest: dict[str, object] = {}
        """The latest line with a memory metric."""
        self.now: int | None = None
        self.highest = 0
        self._tail = LineTail(path)
        self._num_restarts = 0

    def read_new_lines(self) -> None:
        """Process the appended lines; start over if the file was truncated or replaced."""
        for lines in self._tail.read_pieces():
            if self._tail.num_restarts != self._num_restarts:
                self._num_restarts = self._tail.num_restarts
                self.latest, self.now, self.highest = {}, None, 0
            self._parse(lines)

    def _parse(self, lines: bytes) -> None:
        last = None
        for last in _NUMBER.finditer(lines):
            number = int(last[2])
            self.highest = max(self.highest, number)
            if last[1] is None:
                self.now = number
        # Parse only the line around the last match, for its step and time.
        if last is not None:
            start, end = lines.rfind(b"\n", 0, last.start()) + 1, lines.find(b"\n", last.end())
            records = parse_lines(lines[start : end if end >= 0 else None]).records
            self.latest = records[0] if records else self.latest
