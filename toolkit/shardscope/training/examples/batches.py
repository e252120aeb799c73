"""Batches of fine-tuning examples: one example per row, padded to the sequence length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardscope.core.number_format import format_count
from shardscope.training.data.batches import Batches
from shardscope.training.examples.token_table import TokenTable

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from shardscope.training.examples.token_table import TokenizedExample


@dataclass(frozen=True, kw_only=True, eq=False)
class ExampleBatches(Batches):
    """One example per row. Labels are -100 for padding and for tokens that bear no loss."""

    table: TokenTable
    seq_len: int
    """Tokens of a row: every step has the shape that the plan predicts."""
    padding_id: int

    @property
    def num_samples(self) -> int:
        """Number of examples."""
        return len(self.table)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all examples, without padding."""
        return len(self.table.ids)

    @property
    def title(self) -> str:
        """See :class:`Batches`."""
        return f"{format_count(self.num_samples, 'example')} of {self.num_tokens:,} tokens"

    def build_batch(self, step: int) -> dict[str, torch.Tensor]:
        """See :class:`Batches`."""
        examples = (self.table[index] for index in self.list_indices(step))
        return pad_examples(enumerate(examples), self.rows, self.seq_len, self.padding_id)


def pad_examples(
    examples: Iterable[tuple[int, TokenizedExample]], rows: int, seq_len: int, padding_id: int
) -> dict[str, torch.Tensor]:
    """Return a batch of ``rows`` rows. ``examples`` come with their row; other rows are empty."""
    import torch

    from shardscope.training.micro_batches import IGNORED_LABEL

    # Padding stands on the right, where causal attention keeps it from all tokens that matter: no attention
    # mask is needed, and FlashAttention kernels stay usable.
    input_ids = torch.full((rows, seq_len), padding_id, dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORED_LABEL)
    for row, (ids, bears_loss) in examples:
        tokens = torch.from_numpy(ids.astype("int64"))
        input_ids[row, : len(tokens)] = tokens
        # An array of its own: torch warns of a view of the read-only file.
        learned = torch.from_numpy(bears_loss.copy())
        labels[row, : len(tokens)] = torch.where(learned, tokens, IGNORED_LABEL)
    return {"input_ids": input_ids, "labels": labels}


def find_padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the padding token, or any other: padding bears no loss and is never attended to."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token_id, int):
            return token_id
    return 0
