"""What ranks log, as it arrives: each look gives what is new and keeps none of it."""

from __future__ import annotations

from typing import Any

from shardscope.runs.folder import RunFolder
from shardscope.runs.records import LineTail, finite_or_special

PIECE_BYTES = 2**20
"""Of each rank's metrics at one look, some thousand lines: a long run is read in pieces."""


class Follow:
    """One reader's place in the metrics of a run, from their beginning. Not for several threads."""

    def __init__(self, folder: RunFolder, world_size: int) -> None:
        self._tails = [LineTail(folder.events(rank)) for rank in range(world_size)]
        self._pieces = [PIECE_BYTES] * world_size
        self.is_behind = False
        """Whether the last look left something that was there already."""

    def read(self) -> list[dict[str, Any]]:
        """New records as ``run.metrics()`` has them, a megabyte of each rank at most, rank by rank."""
        self.is_behind = False
        new = []
        for rank, tail in enumerate(self._tails):
            try:
                size = tail.path.stat().st_size
            except OSError:
                continue
            before, end = tail.offset, tail.offset + self._pieces[rank]
            records = tail.read(end)
            more = size > end
            self.is_behind |= more
            # A line that is longer than a piece would never be whole.
            self._pieces[rank] = 2 * self._pieces[rank] if more and tail.offset == before else PIECE_BYTES
            new += [{key: finite_or_special(value) for key, value in each.items()} for each in records]
        return new
