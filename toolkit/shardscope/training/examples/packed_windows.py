"""Packed windows: several examples in one row of a batch, best fit decreasing.

Lengths alone decide which examples share a window, so the table of tokens stays as it is, mapped into memory.
trl's ``pack_dataset(strategy="bfd")`` (1.16, data_utils.py) makes the same choice for 1,000 examples at a
time, but writes all tokens again, as lists of an Arrow table, and is no dependency of ours.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.number_format import format_count
from shardscope.training.data.batches import Batches
from shardscope.training.examples.token_table import TokenTable

if TYPE_CHECKING:
    import torch

    from shardscope.training.examples.token_table import OffsetArray, TokenizedExample

EXAMPLES, WINDOWS = "packed_examples.npy", "packed_windows.npy"


def pack_lengths(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Return the windows of ``seq_len`` tokens, each as the indices of its examples.

    The longest examples are placed first, each into the window with the least space that it fits (best fit
    decreasing). Lengths beyond ``seq_len`` fill a window of their own.
    """
    windows: list[list[int]] = []
    # Windows by the space that is left in them, and these spaces in order.
    by_space: dict[int, list[list[int]]] = {}
    spaces: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = min(lengths[index], seq_len)
        position = bisect_left(spaces, length)
        if position == len(spaces):
            window, space = list[int](), seq_len
            windows.append(window)
        else:
            space = spaces[position]
            window = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[position]
        window.append(index)
        left = space - length
        if left not in by_space:
            by_space[left] = []
            insort(spaces, left)
        by_space[left].append(window)
    return windows


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Examples of each window: window ``i`` has ``examples[starts[i]:starts[i + 1]]``."""

    examples: OffsetArray
    """Indices of examples, int64."""
    starts: OffsetArray
    """Int64, shape ``[num_windows + 1]``."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, window: int) -> list[int]:
        return [int(index) for index in self.examples[self.starts[window] : self.starts[window + 1]]]

    def save(self, folder: Path) -> None:
        """Write both arrays into the folder of the tokens."""
        import numpy

        numpy.save(folder / EXAMPLES, self.examples)
        numpy.save(folder / WINDOWS, self.starts)

    @classmethod
    def load(cls, folder: Path) -> Packing:
        """Return the packing of ``folder``, mapped into memory."""
        import numpy

        examples, starts = (
            numpy.load(folder / name, mmap_mode="r", allow_pickle=False) for name in (EXAMPLES, WINDOWS)
        )
        return cls(examples=examples, starts=starts)


def pack_table(table: TokenTable, seq_len: int) -> Packing:
    """Return the windows of all examples of ``table``."""
    import numpy

    windows = pack_lengths(numpy.diff(table.offsets).tolist(), seq_len)
    return Packing(
        examples=numpy.asarray([index for window in windows for index in window], dtype=numpy.int64),
        starts=numpy.cumsum([0, *map(len, windows)], dtype=numpy.int64),
    )


def describe_packing(table: TokenTable, packing: Packing, seq_len: int) -> str:
    """Return a sentence for the log about the padding that packing saves."""
    examples, windows = format_count(len(table), "example"), format_count(len(packing), "window")
    return (
        f"packing: {examples} in {windows} of {seq_len:,} tokens; padding is "
        f"{100 * (1 - len(table.ids) / (len(packing) * seq_len)):.0f} % instead of "
        f"{100 * (1 - len(table.ids) / (len(table) * seq_len)):.0f} %"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatches(Batches):
    """One window per row. ``position_ids`` begin at 0 in each example, from which the engine makes a mask.

    Labels are -100 for padding, for tokens that bear no loss, and for the first token of each example, which
    would be predicted from the example before it.
    """

    table: TokenTable
    packing: Packing
    seq_len: int
    padding_id: int

    @property
    def num_samples(self) -> int:
        """Number of windows."""
        return len(self.packing)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all examples, without padding."""
        return len(self.table.ids)

    @property
    def title(self) -> str:
        """See :class:`Batches`."""
        examples, windows = format_count(len(self.table), "example"), format_count(self.num_samples, "window")
        return f"{examples} of {self.num_tokens:,} tokens, in {windows}"

    def build_batch(self, step: int) -> dict[str, torch.Tensor]:
        """See :class:`Batches`."""
        windows = [
            [self.table[index] for index in self.packing[window]] for window in self.list_indices(step)
        ]
        return fill_windows(windows, self.rows, self.seq_len, self.padding_id)


def fill_windows(
    windows: Sequence[Sequence[TokenizedExample]], rows: int, seq_len: int, padding_id: int
) -> dict[str, torch.Tensor]:
    """Return a batch of one window per row, each with its examples; further rows are empty."""
    import torch

    from shardscope.training.micro_batches import IGNORED_LABEL

    input_ids = torch.full((rows, seq_len), padding_id, dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORED_LABEL)
    # Padding is a document of its own; an empty row is only padding.
    position_ids = torch.arange(seq_len).repeat(rows, 1)
    for row, window in enumerate(windows):
        start = 0
        for ids, bears_loss in window:
            tokens = torch.from_numpy(ids.astype("int64"))
            end = start + len(tokens)
            input_ids[row, start:end] = tokens
            # An array of its own: torch warns of a view of the read-only file.
            learned = torch.from_numpy(bears_loss.copy())
            labels[row, start:end] = torch.where(learned, tokens, IGNORED_LABEL)
            labels[row, start] = IGNORED_LABEL
            # The next example, or the padding, begins at 0, too.
            position_ids[row, end:] = torch.arange(seq_len - end)
            start = end
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
