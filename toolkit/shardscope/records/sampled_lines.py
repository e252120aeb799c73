"""The lines of metrics as they come, or the latest of them where a rank logs more than can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardscope.records.files import LineTail
from shardscope.records.regular_files import size_of


class SampledLines:
    """Reads a growing file of JSON lines, a piece at each call, and skips what would keep it ever later."""

    def __init__(self, path: Path, *, piece_bytes: int, max_behind_bytes: int) -> None:
        """``max_behind_bytes``: what may be left for later calls; of more, only the last piece is read."""
        self._tail = LineTail(path)
        self._piece_bytes = piece_bytes
        self._max_behind_bytes = max_behind_bytes
        self.num_skipped_bytes = 0
        self.is_behind = False
        """Whether the last call left something that was there already."""

    def read(self) -> list[dict[str, Any]]:
        """Return new complete records, oldest first, of ``piece_bytes`` at most."""
        size = size_of(self._tail.path)
        if size - self._tail.offset > self._max_behind_bytes:
            self._skip_to(size - self._piece_bytes)
        before, end = self._tail.offset, self._tail.offset + self._piece_bytes
        records = self._tail.read(end)
        if size >= end and self._tail.offset == before:
            # One line that is longer than a piece: nobody needs that as a number.
            self._skip_to(end)
        self.is_behind = size > self._tail.offset + self._piece_bytes
        return records

    def _skip_to(self, offset: int) -> None:
        """Go on after ``offset``. The rest of a line that is cut there is no record."""
        self.num_skipped_bytes += offset - self._tail.offset
        self._tail.offset = offset
