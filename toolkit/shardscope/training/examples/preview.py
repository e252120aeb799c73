"""Preview of fine-tuning data: the first examples token by token, lengths, and what truncation loses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from shardscope.training.examples.encoding import Encoded, Encoder, LossOn
from shardscope.training.examples.formats import Format
from shardscope.training.examples.rows import Rows
from shardscope.training.examples.token_table import BadRows, RowCounts, check_examples, iterate_encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SAMPLED_ROWS = 2000
"""Rows whose lengths a preview measures, evenly spaced: tokenizing takes about a second."""
MAX_SHOWN_TOKENS = 1500
"""Tokens of one row that the HTML shows."""
QUANTILES = (0.5, 0.9, 0.95, 1.0)


@dataclass(frozen=True, kw_only=True)
class PreviewRow:
    """One example as the model reads it."""

    index: int
    """Index of the row in the data, from 0."""
    tokens: list[str]
    """Text of each token; characters of several tokens are shown at the last of them."""
    ids: list[int]
    bears_loss: list[bool]
    """For each token, whether the model learns to predict it."""


@dataclass(frozen=True, kw_only=True)
class Preview:
    """Preview of a fine-tuning task's data, after template and truncation."""

    source: str
    format: Format
    rows: list[PreviewRow]
    lengths: list[int]
    """Tokens of each measured example, before truncation."""
    seq_len: int | None
    """Sequence length to which examples are cut; None: they are not cut."""
    loss_on: LossOn
    counts: RowCounts
    """Counts over the measured rows."""
    num_rows: int
    """Number of rows of the data."""

    @property
    def num_tokens_per_epoch(self) -> int:
        """Tokens of all examples, estimated from the measured ones if not all rows are."""
        return round(self.counts.num_tokens * self.num_rows / max(1, self.counts.num_rows))

    def length_at(self, quantile: float) -> int:
        """Return the number of tokens that this share of the examples does not exceed."""
        ordered = sorted(self.lengths)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]

    @property
    def sentences(self) -> list[str]:
        """Findings about the data, the most important first."""
        counts, measured = self.counts, len(self.lengths)
        sample = "" if counts.num_rows == self.num_rows else f" (measured on {counts.num_rows:,} of them)"
        lines = [
            f"{self.num_rows:,} rows{sample}, format {self.format.title}.",
            f"{self.num_tokens_per_epoch:,} tokens per epoch; "
            f"{counts.num_loss_tokens / max(1, counts.num_tokens):.0%} of them bear loss.",
            "Length in tokens: "
            + ", ".join(
                f"{'longest' if share == 1 else f'{share:.0%} at most'} {self.length_at(share):,}"
                for share in QUANTILES
            )
            + ".",
        ]
        if self.seq_len is not None:
            total = sum(self.lengths)
            if counts.num_truncated_rows:
                lines.append(
                    f"A sequence length of {self.seq_len:,} cuts {counts.num_truncated_rows:,} of "
                    f"{measured:,} rows and {counts.num_truncated_tokens / total:.1%} of all tokens."
                )
            padded = measured * self.seq_len
            used = (total - counts.num_truncated_tokens) / padded
            lines.append(f"Unpacked rows of {self.seq_len:,} tokens are {1 - used:.0%} padding.")
        if counts.num_rows_without_loss:
            lines.append(
                f"{counts.num_rows_without_loss:,} rows are left out: truncation cuts off all tokens that "
                "bear loss."
            )
        if counts.num_bad_rows:
            lines.append(f"{counts.num_bad_rows:,} malformed rows are skipped: {'; '.join(counts.bad_rows)}.")
        return lines

    def to_html(self) -> str:
        """Return a self-contained HTML fragment: sentences, then each row with its learned tokens marked."""
        sentences = "".join(f"<li>{escape(line)}</li>" for line in self.sentences)
        rows = "".join(_render_row(row) for row in self.rows)
        return (
            f'<div class="shardscope-preview"><style>{STYLE}</style><ul>{sentences}</ul>'
            '<p class="legend"><mark>learned</mark> <span>context only</span></p>'
            f"{rows}</div>"
        )

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        return "\n".join(self.sentences)


# Both colours have enough contrast on JupyterLab's light and dark background, and the learned tokens are
# underlined for those who see no difference in colour.
STYLE = """
.shardscope-preview { font: 13px/1.5 var(--jp-ui-font-family, sans-serif);
  color: var(--jp-ui-font-color1, #222); }
.shardscope-preview ul { margin: 0 0 8px; padding-left: 18px; }
.shardscope-preview pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 10px; padding: 8px 10px;
  font: 12px/1.6 var(--jp-code-font-family, monospace); background: var(--jp-layout-color2, #f3f3f3);
  color: var(--jp-ui-font-color2, #555); border-radius: 4px; max-height: 260px; overflow: auto; }
.shardscope-preview mark { background: rgba(58, 134, 255, 0.22); color: var(--jp-ui-font-color0, #000);
  border-bottom: 2px solid #3a86ff; }
.shardscope-preview .legend { margin: 0 0 6px; color: var(--jp-ui-font-color2, #555); }
.shardscope-preview .legend span { margin-left: 10px; }
.shardscope-preview h4 { margin: 0 0 3px; font-weight: 600; }
"""


def _render_row(row: PreviewRow) -> str:
    pieces, learned = [], False
    for token, bears_loss in list(zip(row.tokens, row.bears_loss, strict=True))[:MAX_SHOWN_TOKENS]:
        if bears_loss != learned:
            pieces.append("<mark>" if bears_loss else "</mark>")
            learned = bears_loss
        pieces.append(escape(token))
    pieces.append("</mark>" if learned else "")
    if len(row.tokens) > MAX_SHOWN_TOKENS:
        pieces.append(f" … {len(row.tokens) - MAX_SHOWN_TOKENS:,} more tokens")
    title = f"Row {row.index + 1}: {len(row.ids):,} tokens, {sum(row.bears_loss):,} learned"
    return f"<h4>{title}</h4><pre>{''.join(pieces)}</pre>"


def preview_examples(
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
    """Return the preview of ``rows``, of which at most 2,000, evenly spaced, are measured.

    Raises ``ValueError`` naming ``field`` for malformed rows, if ``bad_rows`` is "refuse", and for data of
    which no row can be trained on.
    """
    encoder, counts = Encoder(tokenizer, loss_on), RowCounts()
    indices = _choose_rows(len(rows), num_shown)
    shown: list[PreviewRow] = []
    lengths: list[int] = []
    for index, encoded in iterate_encoded(
        field, rows, format, encoder, seq_len=None, bad_rows=bad_rows, counts=counts, indices=indices
    ):
        lengths.append(len(encoded.ids))
        cut = encoded if seq_len is None else encoded.truncate(seq_len)
        _count_truncation(counts, encoded, cut)
        if len(shown) < num_shown and cut.num_loss_tokens:
            shown.append(_describe_row(tokenizer, index, cut))
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


def _choose_rows(num_rows: int, num_shown: int) -> Sequence[int]:
    """Return the indices of the first ``num_shown`` rows and of others, evenly spaced."""
    if num_rows <= MAX_SAMPLED_ROWS:
        return range(num_rows)
    spacing = num_rows / MAX_SAMPLED_ROWS
    return sorted({*range(num_shown), *(int(number * spacing) for number in range(MAX_SAMPLED_ROWS))})


def _count_truncation(counts: RowCounts, encoded: Encoded, cut: Encoded) -> None:
    """Correct ``counts``, which were made without truncation so that full lengths are known."""
    num_cut = len(encoded.ids) - len(cut.ids)
    if not num_cut:
        return
    counts.num_truncated_rows += 1
    counts.num_truncated_tokens += num_cut
    counts.num_tokens -= num_cut
    counts.num_loss_tokens -= encoded.num_loss_tokens - cut.num_loss_tokens
    if not cut.num_loss_tokens:
        counts.num_rows_without_loss += 1
        counts.num_examples -= 1
        counts.num_tokens -= len(cut.ids)


def _describe_row(tokenizer: PreTrainedTokenizerBase, index: int, encoded: Encoded) -> PreviewRow:
    return PreviewRow(
        index=index,
        tokens=_split_text(tokenizer, encoded.ids),
        ids=encoded.ids,
        bears_loss=encoded.bears_loss,
    )


def _split_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text of each token, such that all together are the decoded text.

    A byte-level token may be a part of a character; decoding gives U+FFFD until the character is complete.
    """
    tokens, pending = [], list[int]()
    for token_id in ids:
        pending.append(token_id)
        text = tokenizer.decode(pending)
        assert isinstance(text, str)
        # Four bytes are the longest character of UTF-8.
        if text.endswith("\ufffd") and len(pending) < 4:
            tokens.append("")
            continue
        tokens.append(text)
        pending = []
    return tokens
