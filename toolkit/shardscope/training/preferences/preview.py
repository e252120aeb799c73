"""Preview of preference pairs: both sides of the first ones token by token, and the lengths of all sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.training.examples.encoding import Encoder, LossOn
from shardscope.training.examples.formats import Format
from shardscope.training.examples.preview import Preview, PreviewRow, choose_rows, describe_row
from shardscope.training.examples.rows import Rows
from shardscope.training.examples.token_table import BadRows, RowCounts, check_examples
from shardscope.training.preferences.pairs import iterate_pairs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def preview_pairs(
    field: str,
    source: str,
    rows: Rows,
    format: Format,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_shown: int,
    seq_len: int | None,
    loss_on: LossOn,
    bad_rows: BadRows,
) -> Preview:
    """Return the preview of pairs as ``preview_examples`` does; each side of a pair is a row of its own.

    Tokens and lengths count both sides; rows and examples are pairs.
    """
    counts, lengths = RowCounts(), list[int]()
    shown: list[PreviewRow] = []
    sides = iterate_pairs(
        field,
        rows,
        format,
        Encoder(tokenizer, loss_on),
        seq_len=seq_len,
        bad_rows=bad_rows,
        counts=counts,
        indices=choose_rows(len(rows), num_shown),
        lengths=lengths,
    )
    for number, (index, encoded) in enumerate(sides):
        if number < 2 * num_shown:
            side = "rejected" if number % 2 else "chosen"
            shown.append(describe_row(tokenizer, index, encoded, side))
    check_examples(field, counts, seq_len)
    return Preview(
        source=source,
        format=format,
        rows=shown,
        lengths=lengths,
        seq_len=seq_len,
        loss_on=loss_on,
        counts=counts,
        num_rows=len(rows),
    )
