"""Preview of fine-tuning data: the first examples token by token, lengths, and what truncation loses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from itertools import compress
from typing import TYPE_CHECKING

from shardscope.core.errors import FieldError
from shardscope.core.number_format import join_list
from shardscope.training.examples.encoding import MAX_CHARACTERS, BeginningEncoder, Encoded, LossOn
from shardscope.training.examples.formats import Format, list_unread_columns
from shardscope.training.examples.length_histogram import HISTOGRAM_STYLE, render_histogram
from shardscope.training.examples.packed_windows import pack_lengths
from shardscope.training.examples.preview_html import LEGEND, STYLE, render_row, render_window
from shardscope.training.examples.rows import Rows
from shardscope.training.examples.token_table import (
    MULTIPLE,
    BadRows,
    RowCounts,
    count_rows,
    describe_skipped_rows,
    find_refusal,
    iterate_encoded,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SAMPLED_ROWS, MAX_SAMPLED_CHARACTERS = 2000, 8_000_000
"""Rows whose lengths a preview measures, evenly spaced, and their characters: tokenizing takes seconds."""
NUM_WEIGHED_ROWS = 16
"""Rows, evenly spaced, whose mean number of characters is that of all."""
MAX_NAMED_COLUMNS = 6
"""Columns that a sentence names."""
QUANTILES = (0.5, 0.9, 0.95, 1.0)
MAX_PADDING, MAX_CUT = 0.3, 0.02
"""Shares of padding and of truncated tokens from which another sequence length is recommended."""
MUCH_LONGER = 1.5
"""If the longest example is this many times as long as 95 % of them, it does not set the sequence length."""


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
    is_special: list[bool]
    """For each token, whether it is one of the tokenizer's special tokens."""
    num_left_out: int = 0
    """Estimated number of tokens after these, of a text of more than 200,000 characters that is not cut."""
    side: str = ""
    """"chosen" or "rejected", of a preference pair; empty for other rows."""


@dataclass(frozen=True, kw_only=True)
class PreviewWindow:
    """A packed window: examples that share one row of a batch. Position ids begin again at each."""

    rows: list[PreviewRow]
    num_padding: int
    """Tokens of padding at the end."""


@dataclass(frozen=True, kw_only=True)
class LengthAdvice:
    """A better sequence length for the data than the plan's, with the reason."""

    seq_len: int
    why: str


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
    bad_rows: BadRows
    counts: RowCounts
    """Counts over the measured rows."""
    num_rows: int
    """Number of rows of the data; of streamed data, of those at the beginning that were read."""
    cost: str = ""
    """A sentence about the extra cost of the objective; empty if there is none."""
    is_streamed: bool = False
    """Whether the data is a stream, of which only the first rows were read."""
    has_template: bool = True
    """Whether the tokenizer has a chat template."""
    unread_files: str = ""
    """A sentence about files of the data's folder that are not read; empty if all are."""
    unread_columns: tuple[str, ...] = ()
    """Columns that are not read, but for row numbers."""
    vocabulary_warning: str = ""
    """A sentence about a tokenizer that is much smaller than the embedding; empty if the sizes are usual."""
    num_shared_rows: int | None = 0
    """Rows of the validation data that are trained on as well; None: not counted, as there are too many."""
    windows: tuple[PreviewWindow, ...] = ()
    """The first windows that packing makes of the measured rows; empty without packing."""
    num_estimated_rows: int = 0
    """Measured rows of which only the beginning was tokenized, so that their length is estimated."""
    refusal: FieldError | None = None
    """Error that a launch raises, because rows have no token that bears loss; None if it accepts the data."""
    forecast: tuple[str, ...] = ()
    """Sentences about memory, steps, time and cost by the plan; empty without one."""

    @property
    def has_pairs(self) -> bool:
        """Return whether the rows are preference pairs."""
        return self.format.name == "preference"

    @property
    def num_tokens_per_epoch(self) -> int:
        """Tokens of all examples, estimated from the measured ones if not all rows are."""
        return round(self.counts.num_tokens * self.num_rows / max(1, self.counts.num_rows))

    def length_at(self, quantile: float) -> int:
        """Return the number of tokens that this share of the examples does not exceed."""
        ordered = sorted(self.lengths)
        return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]

    def select_learnable(self, seq_len: int) -> Preview:
        """Return this preview without the lengths of rows of which ``seq_len`` tokens leave nothing to learn.

        They are not trained on. Unchanged if no row would be left.
        """
        is_left_out = [needed is None or needed > seq_len for needed, _ in self.counts.lengths_without_loss]
        rows = self.counts.lengths_without_loss
        others = Counter(length for _, lengths in compress(rows, is_left_out) for length in lengths)
        lengths = list((Counter(self.lengths) - others).elements())
        if not others or not lengths:
            return self
        kept = [row for row, left_out in zip(rows, is_left_out, strict=True) if not left_out]
        return replace(self, lengths=lengths, counts=replace(self.counts, lengths_without_loss=kept))

    def padding_at(self, seq_len: int) -> float:
        """Return the share of padding in unpacked rows of ``seq_len`` tokens."""
        lengths = self.select_learnable(seq_len).lengths
        return 1 - sum(min(length, seq_len) for length in lengths) / (len(lengths) * seq_len)

    def count_windows(self, seq_len: int) -> int:
        """Return the number of windows of ``seq_len`` tokens that packing makes of the measured examples."""
        return len(pack_lengths(self.select_learnable(seq_len).lengths, seq_len))

    def compute_packing_gain(self, seq_len: int) -> float:
        """Return the average number of examples in a window of ``seq_len`` tokens."""
        return len(self.select_learnable(seq_len).lengths) / self.count_windows(seq_len)

    def cut_at(self, seq_len: int) -> float:
        """Return the share of all tokens that rows of ``seq_len`` tokens cut off."""
        return sum(max(0, length - seq_len) for length in self.lengths) / sum(self.lengths)

    def recommend_length(self, max_length: int) -> LengthAdvice | None:
        """Return a better sequence length than :attr:`seq_len`, at most the model's ``max_length``.

        It is the longest example's, or that of 95 % of the examples if few are much longer and cutting them
        loses little; if rows without a token that bears loss are refused, at least a length that leaves every
        row one. Rows that teach nothing even at ``max_length`` do not count. None if padding and truncation
        are small now, or if no other length is better.
        """
        if self.seq_len is None:
            return None
        learnable = self.select_learnable(max_length)
        usual, longest = (
            min(max_length, -(-learnable.length_at(share) // MULTIPLE) * MULTIPLE) for share in (0.95, 1.0)
        )
        best = usual if longest > MUCH_LONGER * usual and learnable.cut_at(usual) <= MAX_CUT else longest
        needed = -(-self.counts.length_with_loss // MULTIPLE) * MULTIPLE
        if self.bad_rows == "refuse" and needed <= max_length:
            best = max(best, needed)
        padding, cut = learnable.padding_at(self.seq_len), learnable.cut_at(self.seq_len)
        lost = learnable.cut_at(best)
        longest_row = "the longest row" + (" that can be learned" if learnable is not self else "")
        covered = f"all but {100 * lost:.1f} % of the data" if lost else longest_row
        if best < self.seq_len and padding > MAX_PADDING:
            why = (
                f"{100 * padding:.0f} % of a row of {self.seq_len:,} tokens is padding, which costs time "
                f"and memory and teaches nothing. {best:,} tokens have "
                f"{100 * learnable.padding_at(best):.0f} % padding and hold {covered}."
            )
        elif best > self.seq_len and self.refusal is not None:
            rows = count_rows(self.counts.num_rows_without_loss)
            why = (
                f"Rows of {self.seq_len:,} tokens leave nothing to learn in {rows}. {best:,} tokens hold "
                f"{covered}."
            )
        elif best > self.seq_len and cut > MAX_CUT:
            why = (
                f"Rows of {self.seq_len:,} tokens cut off {100 * cut:.1f} % of the data. {best:,} tokens "
                f"hold {covered}."
            )
        else:
            return None
        return LengthAdvice(seq_len=best, why=why)

    @property
    def sentences(self) -> list[str]:
        """Findings about the data, the most important first."""
        counts, measured = self.counts, len(self.lengths)
        sample = "" if counts.num_rows == self.num_rows else f" (measured on {counts.num_rows:,} of them)"
        lines = [
            f"{'The first ' * self.is_streamed}{count_rows(self.num_rows)}{sample}, "
            f"format {self.format.title}.",
            f"{self.num_tokens_per_epoch:,} tokens{' in them' if self.is_streamed else ' per epoch'}; "
            f"{100 * counts.num_loss_tokens / max(1, counts.num_tokens):.0f} % of them bear loss.",
            "Length in tokens: "
            + ", ".join(
                f"{'longest' if share == 1 else f'{100 * share:.0f} % at most'} {self.length_at(share):,}"
                for share in QUANTILES
            )
            + ".",
        ]
        if self.num_estimated_rows:
            lines.append(
                f"The length of {count_rows(self.num_estimated_rows)} with a text of more than "
                f"{MAX_CHARACTERS:,} characters is estimated from its beginning."
            )
        if self.unread_columns:
            lines.append(self.unread_columns_sentence)
        if self.unread_files:
            lines.insert(1, self.unread_files)
        if self.refusal is not None:
            lines.insert(1, f"A run with these data raises an error: {self.refusal.summary}.")
        if self.seq_len is not None:
            if counts.num_truncated_rows:
                lines.append(
                    f"A sequence length of {self.seq_len:,} cuts {counts.num_truncated_rows:,} of "
                    f"{measured:,} rows and {100 * self.cut_at(self.seq_len):.1f} % of all tokens."
                )
            lines.append(self._describe_packing(self.seq_len))
        if self.vocabulary_warning:
            lines.append(self.vocabulary_warning)
        if not self.has_template and self.format.name != "text":
            lines.append(
                "The tokenizer has no chat template: the model reads the completion right after the prompt."
            )
        if counts.num_rows_without_loss and self.refusal is None:
            lines.append(
                f"Left out: {count_rows(counts.num_rows_without_loss)} without a token that bears loss "
                f"({counts.named_rows_without_loss})."
            )
        if counts.num_bad_rows:
            lines.append(f"S{describe_skipped_rows(counts)[1:]}.")
        if self.num_shared_rows:
            lines.append(self.shared_rows_sentence)
        return [*lines, *filter(None, [self.cost]), *self.forecast]

    @property
    def shared_rows_sentence(self) -> str:
        """The number of validation rows that are trained on as well, as a sentence; empty without any."""
        if not self.num_shared_rows:
            return ""
        return (
            f"Rows of the validation data that are trained on as well: {self.num_shared_rows:,}. Their "
            "validation loss shows what was memorized."
        )

    @property
    def unread_columns_sentence(self) -> str:
        """The columns that are not read, as a sentence; empty without any."""
        if not self.unread_columns:
            return ""
        names = list(self.unread_columns)
        if len(names) > MAX_NAMED_COLUMNS:
            names = [*names[: MAX_NAMED_COLUMNS - 1], f"{len(names) - MAX_NAMED_COLUMNS + 1} more"]
        return f"Columns that are not read: {join_list(names)}."

    @property
    def lost_data_sentence(self) -> str:
        """The rows that are left out, and the share of tokens that is cut off, if it is not small."""
        counts, parts = self.counts, list[str]()
        if counts.num_rows_without_loss and self.refusal is None:
            parts.append(f"{count_rows(counts.num_rows_without_loss)} without a token that bears loss")
        if counts.num_bad_rows:
            parts.append(count_rows(counts.num_bad_rows, "malformed row"))
        cut = 0.0 if self.seq_len is None else self.select_learnable(self.seq_len).cut_at(self.seq_len)
        if cut > MAX_CUT:
            others = " other" if parts else ""
            parts.append(f"{100 * cut:.3g} % of all{others} tokens, beyond the sequence length")
        of = "" if counts.num_rows == self.num_rows else f", of {count_rows(counts.num_rows)} measured"
        return f"Not trained on: {join_list(parts)}{of}." if parts else ""

    def _describe_packing(self, seq_len: int) -> str:
        line = f"Unpacked rows of {seq_len:,} tokens are {100 * self.padding_at(seq_len):.0f} % padding."
        if self.has_pairs:
            return line  # Pairs are not packed.
        gain = self.compute_packing_gain(seq_len)
        if gain <= 1:
            return line
        padding = 1 - (1 - self.padding_at(seq_len)) * gain
        num_examples = round(self.num_rows * self.counts.num_examples / max(1, self.counts.num_rows))
        num_windows = math.ceil(num_examples / gain)
        return (
            f"{line} Packing makes {count_rows(num_windows, 'window')} of {num_examples:,} rows, {gain:.1f} "
            f"times fewer steps per epoch, with {100 * padding:.0f} % padding."
        )

    def to_html(self) -> str:
        """Return a self-contained HTML fragment: sentences, histogram, rows with learned tokens marked."""
        sentences = "".join(f"<li>{escape(line)}</li>" for line in self.sentences)
        histogram = render_histogram(self.lengths, self.seq_len)
        return (
            f'<div class="shardscope-preview"><style>{STYLE}{HISTOGRAM_STYLE}</style><ul>{sentences}</ul>'
            f'<div class="chart">{histogram}</div></div>'
            f"{self.rows_to_html()}"
        )

    def rows_to_html(self) -> str:
        """Return a self-contained HTML fragment of the rows, with a legend."""
        windows = [render_window(number, window) for number, window in enumerate(self.windows, 1)]
        rows = "".join(windows or map(render_row, self.rows))
        return f'<div class="shardscope-preview"><style>{STYLE}</style>{LEGEND}{rows}</div>'

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    __repr__ = __str__


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
    packing: bool = False,
    max_seq_len: int | None = None,
) -> Preview:
    """Return the preview of ``rows``, of which at most 2,000, evenly spaced, are measured, fewer long ones.

    Each side of a preference pair is a row of its own: tokens and lengths count both sides, rows and examples
    are pairs. With ``packing`` the first ``num_shown`` windows of ``seq_len`` tokens are shown as well.

    Rows without a token that bears loss are shown as well if a launch refuses them, with its error in
    ``refusal``. Raises ``ValueError`` naming ``field`` for malformed rows, unless ``bad_rows`` is "skip", and
    then for data of which no row can be trained on. ``max_seq_len``: see :func:`find_refusal`.
    """
    counts, lengths, shown = RowCounts(), list[int](), list[PreviewRow]()
    left_out: list[tuple[int, Encoded]] = []
    encoder = BeginningEncoder(tokenizer, loss_on, seq_len)
    sides = ("chosen", "rejected") if format.name == "preference" else ("",)
    encode = partial(iterate_encoded, field, rows, format, encoder, seq_len=seq_len, bad_rows=bad_rows)
    sampled = _choose_rows(rows, format, num_shown)
    encoded = encode(counts=counts, indices=sampled, lengths=lengths, left_out=left_out)
    indices, cut_lengths = list[int](), list[int]()
    for number, (index, example) in enumerate(encoded):
        indices.append(index)
        cut_lengths.append(example.length)
        if len(shown) < num_shown * len(sides):
            shown.append(_describe_row(tokenizer, index, example, sides[number % len(sides)]))
    num_estimated = encoder.num_estimated  # Of the rows that are measured, not of those shown in windows.
    refusal = find_refusal(field, counts, seq_len, bad_rows, max_seq_len)
    if refusal is not None:
        if bad_rows == "skip":
            raise refusal
        shown += [
            _describe_row(tokenizer, index, example, sides[number % len(sides)])
            for number, (index, example) in enumerate(left_out[: num_shown * len(sides)])
        ]
        shown.sort(key=lambda row: row.index)  # Stable: the sides of a pair keep their order.
    windows: tuple[PreviewWindow, ...] = ()
    if packing and seq_len is not None and len(sides) == 1:
        packed = pack_lengths(cut_lengths, seq_len)[:num_shown]
        # Encoded again: only a few of the measured examples are in these windows.
        again = encode(
            counts=RowCounts(), indices=sorted(indices[place] for window in packed for place in window)
        )
        by_index = {index: _describe_row(tokenizer, index, example, "") for index, example in again}
        windows = tuple(
            PreviewWindow(
                rows=[by_index[indices[place]] for place in window],
                num_padding=seq_len - sum(cut_lengths[place] for place in window),
            )
            for window in packed
        )
    return Preview(
        source=source,
        format=format,
        rows=shown,
        lengths=lengths,
        seq_len=seq_len,
        loss_on=loss_on,
        bad_rows=bad_rows,
        counts=counts,
        num_rows=len(rows),
        unread_columns=tuple(list_unread_columns(format, rows.column_names)),
        has_template=encoder.has_template,
        num_estimated_rows=num_estimated,
        windows=windows,
        refusal=refusal,
    )


def _choose_rows(rows: Rows, format: Format, num_shown: int) -> Sequence[int]:
    """Return the indices of the first ``num_shown`` rows and of others, evenly spaced."""
    num_rows = len(rows)
    weighed = [rows[index] for index in _space_evenly(num_rows, NUM_WEIGHED_ROWS)]
    num_characters = sum(len(str(row[column])) for row in weighed for column in format.columns.values())
    # All weighed texts may be empty.
    num_affordable = MAX_SAMPLED_CHARACTERS * len(weighed) // max(1, num_characters)
    num_sampled = max(1, min(MAX_SAMPLED_ROWS, num_affordable))
    if num_rows <= num_sampled:
        return range(num_rows)
    return sorted({*range(min(num_shown, num_rows)), *_space_evenly(num_rows, num_sampled)})


def _space_evenly(num_rows: int, number: int) -> list[int]:
    """Return the indices of ``number`` of the rows, or of all if there are fewer."""
    number = min(num_rows, number)
    return [int(place * num_rows / number) for place in range(number)]


def _describe_row(tokenizer: PreTrainedTokenizerBase, index: int, encoded: Encoded, side: str) -> PreviewRow:
    """Return one example as the model reads it."""
    special = set(tokenizer.all_special_ids)
    return PreviewRow(
        index=index,
        tokens=_split_text(tokenizer, encoded.ids),
        ids=encoded.ids,
        bears_loss=encoded.bears_loss,
        is_special=[token_id in special for token_id in encoded.ids],
        num_left_out=encoded.num_left_out,
        side=side,
    )


def _split_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text of each token, such that all together are the decoded text.

    A byte-level token may be a part of a character; decoding gives U+FFFD until the character is complete.
    """
    tokens, pending = [], list[int]()
    # Decoding takes 10 microseconds, and a row of megabytes repeats a few thousand tokens.
    texts: dict[tuple[int, ...], str] = {}
    for token_id in ids:
        pending.append(token_id)
        key = tuple(pending)
        text = texts.get(key)
        if text is None:
            decoded = tokenizer.decode(pending)
            assert isinstance(decoded, str)
            text = texts[key] = decoded
        # Four bytes are the longest character of UTF-8.
        if text.endswith("\ufffd") and len(pending) < 4:
            tokens.append("")
            continue
        tokens.append(text)
        pending = []
    return tokens
