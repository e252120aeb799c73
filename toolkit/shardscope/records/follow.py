"""What ranks log, as it arrives: each look gives what is new and keeps none of it."""

from __future__ import annotations

from typing import Any

from shardscope.records.files import LineTail, finite_or_special
from shardscope.records.folder import RunFolder
from shardscope.records.regular_files import size_of

PIECE_BYTES = 2**20
"""Of each rank's metrics at one look, some thousand lines: a long run is read in pieces."""
MAX_BEHIND_BYTES = 2**26
"""Of all ranks' metrics that are there and not read yet. Of more, an even sample is read: a run of gigabytes
shows its whole course in seconds, and one that logs faster than anybody reads shows what it does now."""
SAMPLE_BYTES = 2**16
"""Read between two parts that are skipped."""


class Follow:
    """One reader's place in the metrics of a run, from their beginning. Not for several threads."""

    def __init__(self, folder: RunFolder, world_size: int) -> None:
        self._tails = [LineTail(folder.events(rank)) for rank in range(world_size)]
        self._pieces = [PIECE_BYTES] * world_size
        self._max_behind = MAX_BEHIND_BYTES // world_size
        self.num_skipped_bytes = 0
        """Of metrics that no look read, since there were too many of them."""
        self.is_behind = False
        """Whether the last look left something that was there already."""

    @property
    def num_read_bytes(self) -> int:
        """Of metrics, so far."""
        return sum(tail.offset for tail in self._tails) - self.num_skipped_bytes

    def read(self) -> list[dict[str, Any]]:
        """New records as ``run.metrics()`` has them, a megabyte of each rank at most, rank by rank.

        Where more than :data:`MAX_BEHIND_BYTES` wait, parts are skipped: ``num_skipped_bytes`` grows.
        """
        self.is_behind = False
        new = []
        for rank, tail in enumerate(self._tails):
            size = size_of(tail.path)
            if size - tail.offset > self._max_behind:
                new += self._sample(tail, size)
                self.is_behind = True
                continue
            before, end = tail.offset, tail.offset + self._pieces[rank]
            records = tail.read(end)
            more = size > end
            self.is_behind |= more
            # A line that is longer than a piece would never be whole.
            self._pieces[rank] = 2 * self._pieces[rank] if more and tail.offset == before else PIECE_BYTES
            new += _as_logged(records)
        return new

    def _sample(self, tail: LineTail, size: int) -> list[dict[str, Any]]:
        """Read some lines and skip the next ones, so many that what is left could be read as a whole."""
        start = tail.offset
        records = tail.read(start + SAMPLE_BYTES)
        goal = start + int(SAMPLE_BYTES * (size - start) / self._max_behind)
        # What is left of a line that is cut there is no record, and is skipped as well.
        if goal > tail.offset:
            self.num_skipped_bytes += goal - tail.offset
            tail.offset = goal
        return _as_logged(records)


def _as_logged(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: finite_or_special(value) for key, value in each.items()} for each in records]
