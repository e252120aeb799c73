"""Arguments of events as compressed blocks of JSON text, decompressed when they are read."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
MAX_BLOCK_BYTES = 256 * 1024**2
"""Maximum bytes of a decompressed block: a cache may come from someone else."""


class ArgumentBlocks:
    """Arguments of the events of one file, by row.

    A block has texts that NUL separates, which JSON cannot contain.
    """

    def __init__(
        self, data: bytes | memoryview, block_bytes: Sequence[int], block_events: Sequence[int]
    ) -> None:
        self._data = data
        self._bounds = np.concatenate(([0], np.cumsum(block_bytes, dtype=np.int64))).tolist()
        self._first_rows = np.concatenate(([0], np.cumsum(block_events, dtype=np.int64)))
        # The latest two, because neighbouring events are often read one after the other. An lru_cache of a
        # method would be a cycle, in which the file of a trace that is no longer used stays open.
        self._latest_blocks: tuple[tuple[int, list[bytes]], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the compressed blocks."""
        return int(self._bounds[-1])

    def iterate(self, rows: Int64s) -> Iterator[tuple[int, bytes]]:
        """Yield each position of ``rows`` with its row's text, block by block; no text for row -1."""
        order = np.argsort(rows, kind="stable")
        blocks = np.searchsorted(self._first_rows, rows[order], side="right") - 1
        first_rows = self._first_rows.tolist()
        latest, texts = -1, list[bytes]()
        for position, row, block in zip(order.tolist(), rows[order].tolist(), blocks.tolist(), strict=True):
            if 0 <= block < len(first_rows) - 1:
                if block != latest:
                    latest, texts = block, self._read_block(block)
                offset = row - first_rows[block]
                yield position, texts[offset] if offset < len(texts) else b""
            else:
                yield position, b""

    def _read_block(self, block: int) -> list[bytes]:
        """Return the texts of a block."""
        for number, texts in self._latest_blocks:
            if number == block:
                return texts
        texts = self._decompress(block)
        self._latest_blocks = ((block, texts), *self._latest_blocks[:1])
        return texts

    def _decompress(self, block: int) -> list[bytes]:
        """Return the texts of a block; empty if it is damaged."""
        packed = self._data[self._bounds[block] : self._bounds[block + 1]]
        try:
            return zlib.decompressobj().decompress(packed, MAX_BLOCK_BYTES).split(b"\0")
        except zlib.error:
            return []


class EventArguments:
    """Arguments of slices or marks of all ranks, by their index in the trace."""

    def __init__(self, blocks: Sequence[ArgumentBlocks], rank_bounds: Int64s, rows: Int64s) -> None:
        """``rank_bounds``: first index of each rank, and the number of all; ``rows``: rows in the files."""
        self._blocks = blocks
        self._rank_bounds = rank_bounds
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> bytes:
        """Return the JSON text of one event's arguments; empty if it has none."""
        return next(text for _, text in self.iterate(np.array([index], np.int64)))

    def iterate(self, index: Int64s) -> Iterator[tuple[int, bytes]]:
        """Yield each position of ``index`` with the JSON text of its arguments, in the order of the files."""
        ranks = np.searchsorted(self._rank_bounds, index, side="right") - 1
        for rank, blocks in enumerate(self._blocks):
            of_rank = np.flatnonzero(ranks == rank)
            positions = of_rank.tolist()
            for position, text in blocks.iterate(self._rows[index[of_rank]].astype(np.int64)):
                yield positions[position], text
