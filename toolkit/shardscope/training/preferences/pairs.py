"""Batches of preference pairs: the chosen rows of a micro-batch, then the rejected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from shardscope.training.data.batches import Batches
from shardscope.training.examples.batches import pad_examples
from shardscope.training.examples.token_table import TokenTable

if TYPE_CHECKING:
    import numpy
    import torch

    FloatArray: TypeAlias = numpy.ndarray[tuple[int], numpy.dtype[numpy.float32]]

LABELS = "pair_labels"
"""Name of a batch's labels, -100 where a token bears no loss. Not ``labels``, by whose number engines weigh
micro-batches: in DPO every pair counts the same."""
REFERENCE = "reference"
"""Name of the reference model's log-probability of each row's answer, fp32, shape ``[rows]``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PairBatches(Batches):
    """Pairs as two rows each; ``rows`` of :class:`Batches` counts pairs.

    In each micro-batch the chosen rows come first, so that one forward computes both sides.
    """

    table: TokenTable
    """Pair ``i`` is the examples ``2 * i`` (chosen) and ``2 * i + 1`` (rejected)."""
    seq_len: int
    """Tokens of a row."""
    padding_id: int
    pairs_per_micro_batch: int
    reference: FloatArray | None = None
    """Log-probability of each example's answer by the reference model; None: the engine computes it from the
    model without its adapters."""

    @property
    def num_samples(self) -> int:
        """Number of pairs."""
        return len(self.table) // 2

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all pairs, without padding."""
        return len(self.table.ids)

    @property
    def title(self) -> str:
        """See :class:`Batches`."""
        return f"{self.num_samples:,} preference pairs of {self.num_tokens:,} tokens"

    def build_batch(self, step: int) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` and :data:`LABELS`, int64, shape ``[2 * rows, seq_len]``.

        With a reference also :data:`REFERENCE`. All labels of the two rows of an empty pair are -100.
        """
        import torch

        numbers = list(self.list_examples(step))
        examples = ((row, self.table[example]) for row, example in numbers)
        batch = pad_examples(examples, 2 * self.rows, self.seq_len, self.padding_id)
        batch[LABELS] = batch.pop("labels")
        if self.reference is not None:
            batch[REFERENCE] = torch.zeros(2 * self.rows)
            for row, example in numbers:
                batch[REFERENCE][row] = float(self.reference[example])
        return batch

    def list_examples(self, step: int) -> Iterator[tuple[int, int]]:
        """Yield each row of this rank's batch at ``step`` with its index in the table."""
        size = self.pairs_per_micro_batch
        for position, pair in enumerate(self.list_indices(step)):
            micro_batch, place = divmod(position, size)
            for side in (0, 1):
                yield (2 * micro_batch + side) * size + place, 2 * pair + side
