"""Batches of preference pairs: the chosen rows of a micro-batch, then the rejected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from shardscope.training.data.batches import Batches
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

        from shardscope.training.micro_batches import IGNORED_LABEL

        # Padding on the right needs no attention mask, as in ExampleBatches.
        input_ids = torch.full((2 * self.rows, self.seq_len), self.padding_id, dtype=torch.int64)
        labels = torch.full_like(input_ids, IGNORED_LABEL)
        reference = torch.zeros(2 * self.rows)
        for row, example in self.list_examples(step):
            ids, bears_loss = self.table[example]
            tokens = torch.from_numpy(ids.astype("int64"))
            input_ids[row, : len(tokens)] = tokens
            labels[row, : len(tokens)] = torch.where(
                torch.from_numpy(bears_loss.copy()), tokens, IGNORED_LABEL
            )
            if self.reference is not None:
                reference[row] = float(self.reference[example])
        batch = {"input_ids": input_ids, LABELS: labels}
        return batch if self.reference is None else {**batch, REFERENCE: reference}

    def list_examples(self, step: int) -> Iterator[tuple[int, int]]:
        """Yield each row of this rank's batch at ``step`` with its index in the table."""
        size = self.pairs_per_micro_batch
        for position, pair in enumerate(self.list_indices(step)):
            micro_batch, place = divmod(position, size)
            for side in (0, 1):
                yield (2 * micro_batch + side) * size + place, 2 * pair + side
