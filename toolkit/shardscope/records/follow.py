"""Incremental reader of all ranks' metrics."""

from __future__ import annotations

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import LineTail, finite_or_special
from shardscope.records.regular_files import size_of

PIECE_BYTES = 2**20
"""Bytes of each rank's metrics per call, some thousand lines: a long run is read in pieces."""
MAX_BEHIND_BYTES = 2**26
"""Bytes of all ranks' unread metrics beyond which an even sample is read. So gigabytes of an old run are
shown in seconds, and a run that logs faster than it can be read shows its current state."""
CALL_BYTES = 2**23
"""Bytes of all ranks' metrics per call, tens of thousands of lines: of many ranks, some are read per call."""
SAMPLE_BYTES = 2**16
"""Bytes read between two skipped parts."""


class Follow:
    """One reader of a run's metrics, from their beginning. Not thread-safe."""

    def __init__(self, folder: RunFolder, world_size: int) -> None:
        self._tails = [LineTail(folder.events(rank)) for rank in range(world_size)]
        self._pieces = [PIECE_BYTES] * world_size
        self._first = 0
        """The rank that the next call begins with."""
        self._max_behind = MAX_BEHIND_BYTES // world_size
        self.num_skipped_bytes = 0
        """Bytes of metrics that were skipped because there were too many."""
        self.is_behind = False
        """Whether the last call left data unread."""

    @property
    def num_read_bytes(self) -> int:
        """Bytes of metrics read so far."""
        return sum(tail.offset for tail in self._tails) - self.num_skipped_bytes

    def read(self) -> list[dict[str, object]]:
        """Return new records in the form of ``run.metrics()``, rank by rank.

        At most 1 MiB of each rank and about 8 MiB of all: ``is_behind`` says whether there is more. If more
        than :data:`MAX_BEHIND_BYTES` are unread, parts are skipped and added to ``num_skipped_bytes``.
        """
        self.is_behind = False
        new: list[dict[str, object]] = []
        num_bytes, num_ranks = 0, len(self._tails)
        for rank in [*range(self._first, num_ranks), *range(self._first)]:
            before = self._tails[rank].offset
            new += self._read_rank(rank)
            num_bytes += self._tails[rank].offset - before
            if num_bytes > CALL_BYTES:
                # The next call continues here, so that no rank waits for ever.
                self._first, self.is_behind = (rank + 1) % num_ranks, True
                break
        return new

    def _read_rank(self, rank: int) -> list[dict[str, object]]:
        tail = self._tails[rank]
        # Per rank, so that one rank that logs too fast does not cost the others their records.
        size = size_of(tail.path)
        if size - tail.offset > self._max_behind:
            self.is_behind = True
            return self._read_sample(tail, size)
        before, end = tail.offset, tail.offset + self._pieces[rank]
        records = tail.read(end)
        more = size > end
        self.is_behind |= more
        # A line longer than the piece would never be complete: double the piece until it is.
        self._pieces[rank] = 2 * self._pieces[rank] if more and tail.offset == before else PIECE_BYTES
        return _restore_floats(records)

    def _read_sample(self, tail: LineTail, size: int) -> list[dict[str, object]]:
        """Read some lines and skip the next ones, in the ratio at which the read part fits into the limit."""
        start = tail.offset
        records = tail.read(start + SAMPLE_BYTES)
        goal = start + int(SAMPLE_BYTES * (size - start) / self._max_behind)
        # The rest of a line that is split at ``goal`` is malformed, and so is skipped too.
        if goal > tail.offset:
            self.num_skipped_bytes += goal - tail.offset
            tail.offset = goal
        return _restore_floats(records)


def _restore_floats(records: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{key: finite_or_special(value) for key, value in record.items()} for record in records]
