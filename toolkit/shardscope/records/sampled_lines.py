"""Incremental reader of one metrics file that skips to the latest lines if it falls behind."""

from __future__ import annotations

from pathlib import Path

from shardscope.records.json_files import LineTail
from shardscope.records.regular_files import size_of


class SampledLines:
    """Reader of a growing JSON lines file: one piece per call, with skipping if it falls behind."""

    def __init__(self, path: Path, *, piece_bytes: int, max_behind_bytes: int, start: int = 0) -> None:
        """Create a reader from byte ``start`` on.

        If more than ``max_behind_bytes`` are unread, it skips to the last piece.
        """
        self._tail = LineTail(path)
        self._tail.offset = start
        self._piece_bytes = piece_bytes
        self._max_behind_bytes = max_behind_bytes
        self.num_skipped_bytes = 0
        self.is_behind = False
        """Whether the last call left data unread."""

    def read(self) -> list[dict[str, object]]:
        """Return new complete records, oldest first, from at most ``piece_bytes``."""
        # Keeping up with the run matters more than completeness: skip what was logged long ago.
        size = size_of(self._tail.path)
        if size - self._tail.offset > self._max_behind_bytes:
            self._skip_to(size - self._piece_bytes)
        before, end = self._tail.offset, self._tail.offset + self._piece_bytes
        records = self._tail.read(end)
        if size >= end and self._tail.offset == before:
            # One line longer than the piece cannot be a metric: skip it.
            self._skip_to(end)
        self.is_behind = size > self._tail.offset + self._piece_bytes
        return records

    def _skip_to(self, offset: int) -> None:
        """Skip to ``offset``. The rest of a line that is split there is malformed."""
        self.num_skipped_bytes += offset - self._tail.offset
        self._tail.offset = offset
