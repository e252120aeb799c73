"""Batches of streamed examples: each rank reads its share of the rows, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.errors import refuse
from shardscope.training.data.batches import Batches
from shardscope.training.examples.batches import pad_examples
from shardscope.training.examples.encoding import Encoder
from shardscope.training.examples.file_rows import has_rows
from shardscope.training.examples.formats import Format
from shardscope.training.examples.packed_windows import fill_windows, pack_lengths
from shardscope.training.examples.rows import Row, describe_source
from shardscope.training.examples.streamed_rows import (
    RowBlock,
    iterate_rows,
    list_stream_files,
    open_stream,
)
from shardscope.training.examples.token_table import (
    BadRows,
    RowCounts,
    check_examples,
    iterate_encoded,
    name_rows,
)

if TYPE_CHECKING:
    import torch
    from datasets import IterableDataset

    from shardscope.training.examples.token_table import TokenizedExample

BLOCK_ROWS = 1000
"""Rows of a rank that are tokenized, shuffled and packed together. A resumed run reads at most one such block
again."""


@dataclass(frozen=True, kw_only=True)
class StreamedExamples:
    """One rank's share of a stream, and how it becomes examples."""

    field: str
    """Name of the source in error messages."""
    source: object
    format: Format
    encoder: Encoder
    seq_len: int
    bad_rows: BadRows
    packs: bool
    """Whether several examples share a row."""
    seed: int
    rank: int
    num_ranks: int
    max_seq_len: int | None = None
    """The model's longest sequence, for suggested fixes; None: not known."""

    def open(self) -> tuple[IterableDataset, bool]:
        """Return this rank's share of the stream, and whether the ranks take turns row by row.

        They do unless the number of files is a multiple of the number of ranks, each of which then reads its
        own files (datasets 5.2, distributed.py).
        """
        from datasets.distributed import split_dataset_by_node

        stream = open_stream(self.field, self.source)
        takes_turns = stream.num_shards % self.num_ranks != 0
        return split_dataset_by_node(stream, self.rank, self.num_ranks), takes_turns


class Place(NamedTuple):
    """Place of a block in the stream of one rank."""

    epoch: int
    block: int
    """Number of blocks of this pass before it."""
    num_rows: int
    """Number of rows of this pass before it."""
    state: Mapping[str, object] | None
    """State of the ``IterableDataset`` before its first row; None: the beginning."""


class StreamReader:
    """Samples of one rank one after another: an example, or a window of several if they are packed.

    One block of rows is in memory at a time. Its samples are shuffled by seed, pass and block: the order is
    that of the files up to blocks.
    """

    def __init__(self, examples: StreamedExamples) -> None:
        self.examples = examples
        self.counts = RowCounts()
        self.num_samples = 0
        """Number of samples read since this process began."""
        self._samples: list[list[TokenizedExample]] = []
        self._offset = 0
        self._go_to(Place(epoch=0, block=0, num_rows=0, state=None))

    def next_sample(self) -> list[TokenizedExample]:
        """Return the next sample. After the last row the stream begins again."""
        while self._offset == len(self._samples):
            self._read_block()
        sample = self._samples[self._offset]
        self._offset += 1
        self.num_samples += 1
        return sample

    def describe_position(self) -> dict[str, object]:
        """Return where the next sample is: the place of its block, and its number in that block."""
        position = self._current._asdict()
        return {**position, "offset": self._offset, "num_ranks": self.examples.num_ranks}

    def resume(self, position: object, num_samples: int) -> None:
        """Continue at ``position`` of :meth:`describe_position`, or without one after ``num_samples``
        samples.

        A position is not valid for another number of ranks, which divide the rows differently.
        """
        data = position if isinstance(position, Mapping) else {}
        names = ("epoch", "block", "num_rows", "offset")
        epoch, block, num_rows, offset = (
            value if isinstance(value := data.get(name), int) else -1 for name in names
        )
        if min(epoch, block, num_rows, offset) >= 0 and data.get("num_ranks") == self.examples.num_ranks:
            state = data.get("state")
            state = state if isinstance(state, Mapping) else None
            self._go_to(Place(epoch=epoch, block=block, num_rows=num_rows, state=state))
            if offset:
                self._read_block()
                self._offset = min(offset, len(self._samples))
            return
        if num_samples:
            print(f"reading the first {num_samples:,} samples of the stream again, to skip them", flush=True)
        for _ in range(num_samples):
            self.next_sample()

    def _go_to(self, place: Place) -> None:
        """Make the block at ``place`` the next one that is read."""
        examples = self.examples
        self._stream, self._takes_turns = examples.open()
        self._files = list_stream_files(examples.field, examples.source)
        if not self._takes_turns:
            # ``datasets`` deals out the files that it is given: those that have a row.
            self._files = list(filter(has_rows, self._files))[examples.rank :: examples.num_ranks]
        if place.state is not None:
            self._stream.load_state_dict(dict(place.state))
        self._rows = iterate_rows(examples.field, examples.source, iter(self._stream))
        self._current = self._next = place
        self._samples, self._offset = [], 0

    def _read_block(self) -> None:
        """Read the next rows and make samples of them. After the last rows, go to the beginning."""
        import numpy

        examples, place = self.examples, self._next
        rows = list(islice(self._rows, BLOCK_ROWS))
        if not rows:
            self._check_pass(place)
            self._go_to(Place(epoch=place.epoch + 1, block=0, num_rows=0, state=None))
            return
        encoded = self._encode_rows(rows, place.num_rows)
        windows = (
            pack_lengths([len(ids) for ids, _ in encoded], examples.seq_len)
            if examples.packs
            else [[index] for index in range(len(encoded))]
        )
        draw = numpy.random.default_rng([examples.seed, place.epoch, place.block])
        self._samples = [
            [encoded[index] for index in windows[window]] for window in draw.permutation(len(windows))
        ]
        self._current, self._offset = place, 0
        state = self._stream.state_dict()
        self._next = Place(place.epoch, place.block + 1, place.num_rows + len(rows), state)

    def _encode_rows(self, rows: list[Row], num_before: int) -> list[TokenizedExample]:
        import numpy

        examples = self.examples
        # Rows are numbered as in the whole stream where the ranks take turns.
        step, first = (examples.num_ranks, examples.rank) if self._takes_turns else (1, 0)
        block = RowBlock(rows=rows, first=first + num_before * step, step=step, files=self._files)
        num_bad, num_left_out = self.counts.num_bad_rows, self.counts.num_rows_without_loss
        encoded = iterate_encoded(
            examples.field,
            block,
            examples.format,
            examples.encoder,
            seq_len=examples.seq_len,
            bad_rows=examples.bad_rows,
            counts=self.counts,
            indices=block.numbers,
        )
        arrays = [
            (numpy.asarray(one.ids, dtype=numpy.int32), numpy.asarray(one.bears_loss, dtype=numpy.bool_))
            for _, one in encoded
        ]
        if self.counts.num_bad_rows > num_bad == 0:
            print(f"malformed rows are skipped, such as {name_rows(self.counts.bad_rows[:1])}", flush=True)
        if self.counts.num_rows_without_loss > num_left_out:
            if arrays or examples.bad_rows == "refuse":  # Another block may have rows to train on.
                self._check_counts()
            if num_left_out == 0:
                named = name_rows(self.counts.rows_without_loss[:1])
                print(f"rows without a token that bears loss are left out, such as {named}", flush=True)
        return arrays

    def _check_pass(self, end: Place) -> None:
        """Raise ``ValueError`` if there is nothing to train on between the beginning and ``end``."""
        examples = self.examples
        if not end.num_rows:
            allowed = f"data with a row for each of {examples.num_ranks} ranks"
            refuse(examples.field, describe_source(examples.source), allowed, {"streaming": False})
        self._check_counts()

    def _check_counts(self) -> None:
        """Raise ``ValueError`` for rows without a token that bears loss, if they are refused."""
        examples = self.examples
        check_examples(examples.field, self.counts, examples.seq_len, examples.bad_rows, examples.max_seq_len)


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedBatches(Batches):
    """Samples in the order of the stream. Batches are built step by step, each once."""

    reader: StreamReader
    seq_len: int
    padding_id: int

    @property
    def num_samples(self) -> int:
        """Number of samples read so far: the stream's length is not known."""
        return self.reader.num_samples

    @property
    def num_tokens(self) -> int:
        """Number of tokens read so far, without padding."""
        return self.reader.counts.num_tokens

    @property
    def title(self) -> str:
        """See :class:`Batches`."""
        packed = ", packed" if self.reader.examples.packs else ""
        return f"a stream of rows, shuffled{packed} in blocks of {BLOCK_ROWS:,}"

    def list_indices(self, step: int) -> list[int]:
        """Return the numbers of the samples that this rank reads at ``step``, which no other rank reads."""
        first = (step * self.num_ranks + self.rank) * self.rows
        return list(range(first, first + self.rows))

    def describe_position(self) -> dict[str, object]:
        """See :class:`Batches`."""
        return self.reader.describe_position()

    def build_batch(self, step: int) -> dict[str, torch.Tensor]:
        """See :class:`Batches`."""
        samples = [self.reader.next_sample() for _ in range(self.rows)]
        if self.reader.examples.packs:
            return fill_windows(samples, self.rows, self.seq_len, self.padding_id)
        return pad_examples(
            enumerate(sample[0] for sample in samples), self.rows, self.seq_len, self.padding_id
        )
