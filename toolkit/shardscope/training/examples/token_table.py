"""Token ids and loss masks of all examples of a data source, cut to the sequence length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias

from shardscope.core.errors import FieldError, refuse
from shardscope.core.number_format import join_list
from shardscope.training.examples.conversation import ChatTemplateError
from shardscope.training.examples.encoding import Encoded, Encoder
from shardscope.training.examples.file_rows import describe_place
from shardscope.training.examples.formats import ExampleError, Format, read_example
from shardscope.training.examples.rows import Row, Rows

if TYPE_CHECKING:
    import numpy

    from shardscope.training.data.tokenizer import TokenIds

    BoolArray: TypeAlias = numpy.ndarray[tuple[int], numpy.dtype[numpy.bool_]]
    OffsetArray: TypeAlias = numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]
    TokenizedExample: TypeAlias = tuple[TokenIds, BoolArray]
    """Token ids, and whether each bears loss."""

BadRows: TypeAlias = Literal["refuse", "skip_truncated", "skip"]
"""What happens to rows that cannot be trained on, malformed ones and those without a token that bears loss.

"refuse" the whole data, or leave rows out and count them: all of them with "skip", only those whose tokens
that bear loss are all cut off by the sequence length with "skip_truncated"."""
BAD_ROWS: tuple[BadRows, ...] = ("refuse", "skip_truncated", "skip")
MAX_NAMED_ROWS = 5
"""Maximum number of bad rows that a message names."""
MULTIPLE = 8
"""Suggested sequence lengths are multiples of this: matrix units are fastest with them."""
IDS, LOSS, OFFSETS = "ids.npy", "loss.npy", "offsets.npy"


@dataclass
class RowCounts:
    """Counts of the rows and tokens that were read, cut and left out."""

    num_rows: int = 0
    num_examples: int = 0
    """Rows that are trained on."""
    num_tokens: int = 0
    """Tokens of the examples after truncation."""
    num_loss_tokens: int = 0
    """Tokens of the examples that bear loss."""
    num_truncated_rows: int = 0
    num_truncated_tokens: int = 0
    """Tokens beyond the sequence length, which are never trained on."""
    bad_rows: list[tuple[str, str]] = field(default_factory=list)
    """The first malformed rows, each with its reason, such as ("row 3", "completion is empty")."""
    num_bad_rows: int = 0
    bad_rows_fix: str = ""
    """The fix of the first of them of which the chat template is the cause; else empty."""
    num_rows_without_loss: int = 0
    """Rows in which no token bears loss, mostly because truncation cuts off all that do."""
    num_never_with_loss: int = 0
    """Those of them in which no token bears loss without truncation, either."""
    rows_without_loss: list[tuple[str, str]] = field(default_factory=list)
    """The first of these rows, each with its reason, such as ("row 3", "no token of it bears loss")."""
    longest_without_loss: int = 0
    """Tokens of the longest of these rows, before truncation."""
    lengths_without_loss: list[tuple[int | None, tuple[int, ...]]] = field(default_factory=list)
    """For each of these rows, the smallest sequence length that leaves it a token that bears loss (None: none
    does), and its tokens before truncation, of a pair those of each side."""
    length_with_loss: int = 0
    """The smallest sequence length that leaves every row a token that bears loss, if any length does."""

    def leave_out(
        self, rows: Rows, index: int, sides: Sequence[Encoded], length: int | None, seq_len: int | None
    ) -> None:
        """Count the row ``index`` of ``rows`` as one without a token that bears loss. A pair has two sides.

        ``length`` is the smallest sequence length with one, None if there is none at any length.
        """
        self.num_rows_without_loss += 1
        if length is None:
            self.num_never_with_loss += 1
            reason = "both answers are the same" if len(sides) > 1 else "no token of it bears loss"
        else:
            what = "what its answers differ in" if len(sides) > 1 else "its completion"
            reason = f"seq_len={seq_len:,} cuts off {what}, which begins at token {length:,}"
        self.lengths_without_loss.append((length, tuple(side.length for side in sides)))
        self.longest_without_loss = max(self.longest_without_loss, *self.lengths_without_loss[-1][1])
        if len(self.rows_without_loss) < MAX_NAMED_ROWS:
            self.rows_without_loss.append((describe_place(rows, index), reason))

    def skip(self, rows: Rows, index: int, error: ValueError) -> None:
        """Count the row ``index`` of ``rows`` as a malformed one."""
        self.num_bad_rows += 1
        if isinstance(error, ChatTemplateError):
            self.bad_rows_fix = self.bad_rows_fix or error.fix
        if len(self.bad_rows) < MAX_NAMED_ROWS:
            self.bad_rows.append((describe_place(rows, index), str(error)))

    @property
    def needed_lengths(self) -> list[int]:
        """For each row that only truncation leaves without loss, the smallest sequence length with some."""
        return [length for length, _ in self.lengths_without_loss if length is not None]

    @property
    def named_rows_without_loss(self) -> str:
        """The first rows without loss and their reasons for messages, with the number of the others."""
        more = self.num_rows_without_loss - len(self.rows_without_loss)
        return name_rows(self.rows_without_loss) + (f"; and {more:,} more" if more else "")


def name_rows(rows: Iterable[tuple[str, str]]) -> str:
    """Return rows with their reasons, such as "row 1 and row 4: text is empty; row 2: text is a number"."""
    places: dict[str, list[str]] = {}
    for place, reason in rows:
        places.setdefault(reason, []).append(place)
    return "; ".join(f"{join_list(named)}: {reason}" for reason, named in places.items())


def _find_length_with_loss(sides: Sequence[Encoded]) -> int | None:
    """Return the smallest length to which a row can be cut such that it can be trained on; None if none is.

    Each side of a pair needs a token that bears loss, and the two must differ.
    """
    lengths = list[int | None]()
    for side in sides:
        # Nothing precedes the first token, which is therefore never learned.
        ends = (end for end, learned in enumerate(side.bears_loss, start=1) if learned and end > 1)
        lengths.append(next(ends, None))
    if len(sides) > 1:
        pairs = zip_longest(*(side.ids for side in sides))
        lengths.append(next((end for end, (one, other) in enumerate(pairs, 1) if one != other), None))
    known = [length for length in lengths if length is not None]
    return max(known) if len(known) == len(lengths) else None


def iterate_encoded(
    field: str,
    rows: Rows,
    format: Format,
    encoder: Encoder,
    *,
    seq_len: int | None,
    bad_rows: BadRows,
    counts: RowCounts,
    indices: Sequence[int] | None = None,
    lengths: list[int] | None = None,
    left_out: list[tuple[int, Encoded]] | None = None,
) -> Iterator[tuple[int, Encoded]]:
    """Yield the index and the tokens of every example that can be trained on, and update ``counts``.

    A preference pair is yielded twice: its chosen side, then its rejected one. ``indices`` are those of the
    rows to read; None: all. ``lengths`` gets the number of tokens before truncation. Rows without a token
    that bears loss after truncation to ``seq_len`` (None: no truncation) are left out and counted, and pairs
    whose sides are then the same: the caller refuses them with :func:`check_examples`. ``left_out`` gets the
    first of them. Raises ``ValueError`` naming ``field`` and the row for a malformed row, unless ``bad_rows``
    is "skip".
    """
    is_pair = format.name == "preference"
    for index in range(len(rows)) if indices is None else indices:
        counts.num_rows += 1
        try:
            example = read_example(format, rows[index])
            sides = encoder.encode_pair(example) if is_pair else (encoder.encode(example),)
        except ValueError as error:
            if bad_rows != "skip":
                place, is_first = describe_place(rows, index), counts.num_rows == 1
                _refuse_row(field, place, rows[index], error, others_are_good=not is_first)
            counts.skip(rows, index, error)
            continue
        cut = [side if seq_len is None else side.truncate(seq_len) for side in sides]
        for side, kept in zip(sides, cut, strict=True):
            if lengths is not None:
                lengths.append(side.length)
            if kept.length < side.length:
                counts.num_truncated_rows += 1
                counts.num_truncated_tokens += side.length - kept.length
        length = _find_length_with_loss(sides)
        counts.length_with_loss = max(counts.length_with_loss, length or 0)
        # trl trained on such rows silently: their mean loss is over no token (trl issues 3728 and 3927).
        if length is None or (seq_len is not None and length > seq_len):
            if left_out is not None and len(counts.rows_without_loss) < MAX_NAMED_ROWS:
                left_out.extend((index, side) for side in cut)
            counts.leave_out(rows, index, sides, length, seq_len)
            continue
        counts.num_examples += 1
        for side in cut:
            counts.num_tokens += side.length
            counts.num_loss_tokens += side.num_loss_tokens
            yield index, side


def check_row(field: str, format: Format, index: int, rows: Rows) -> None:
    """Raise ``ValueError`` naming ``field`` and the row if the row is malformed. Tokenizes nothing."""
    row = rows[index]
    try:
        read_example(format, row)
    except ValueError as error:
        _refuse_row(field, describe_place(rows, index), row, error)


def _refuse_row(
    field: str, place: str, row: Row, error: ValueError, *, others_are_good: bool = True
) -> NoReturn:
    shown = str(dict(row))
    shown = shown if len(shown) <= 120 else f"{shown[:117]}..."
    skipping = f"{field.partition('.')[0]}(bad_rows='skip')"
    fix = f"repair {place}, or {skipping}"
    if isinstance(error, ExampleError):
        fix = error.fix
    value, allowed = f"data whose {place} is malformed", "rows of one format"
    if isinstance(error, ChatTemplateError):
        value, allowed = f"data whose {place} cannot be rendered", "a chat template that renders the data"
        fix += f"; or {skipping}" if others_are_good else ""
    allowed = f"{allowed}. {place[0].upper()}{place[1:]}: {error} ({shown})"
    refuse(field, value, allowed, fix, f"{place}: {error}")


def check_examples(
    field: str, counts: RowCounts, seq_len: int | None, bad_rows: BadRows, max_seq_len: int | None
) -> None:
    """Raise ``ValueError`` naming ``field`` if no row can be trained on, or if ``bad_rows`` refuses some."""
    refusal = find_refusal(field, counts, seq_len, bad_rows, max_seq_len)
    if refusal is not None:
        raise refusal


def find_refusal(
    field: str, counts: RowCounts, seq_len: int | None, bad_rows: BadRows, max_seq_len: int | None
) -> FieldError | None:
    """Return the error of data in which rows have no token that bears loss; None if they are accepted.

    The message names the first rows with their reasons. ``max_seq_len`` is the longest sequence that the fix
    may suggest: the model's; None: any.
    """
    number = counts.num_rows_without_loss
    is_refused = bad_rows == "refuse" or (bad_rows == "skip_truncated" and counts.num_never_with_loss > 0)
    if counts.num_examples and not (number and is_refused):
        return None
    if not number:
        # Not in the value, of which an error shows 80 characters.
        named = name_rows(counts.bad_rows)
        return FieldError(
            field,
            f"{count_rows(counts.num_rows)}, all malformed",
            f"at least one readable row. {named[:1].upper()}{named[1:]}",
            counts.bad_rows_fix or "repair them",
            f"all rows are malformed ({named})",
        )
    fixes = []
    longer = min(-(-counts.longest_without_loss // MULTIPLE) * MULTIPLE, max_seq_len or 2**62)
    if kept := sum(length <= longer for length in counts.needed_lengths):
        named = "it" if number == 1 else "all of them" if kept == number else f"{kept:,} of them"
        fixes.append(f"Recipe(seq_len={longer}), which keeps {named}")
    if counts.num_examples:
        fixes.append(f"{field.partition('.')[0]}(bad_rows='skip'), which leaves out what cannot be learned")
    return FieldError(
        field,
        f"data with {count_rows(number)} without a token that bears loss",
        f"rows with tokens to learn. {counts.named_rows_without_loss[:1].upper()}"
        f"{counts.named_rows_without_loss[1:]}",
        ", or ".join(fixes) or "shorter prompts",
        f"{count_rows(number)} without a token that bears loss ({counts.named_rows_without_loss})",
    )


def describe_counts(counts: RowCounts, seq_len: int) -> list[str]:
    """Return clauses for the log: the examples, and the rows that are cut or left out."""
    lines = [
        f"{counts.num_examples:,} of {counts.num_rows:,} rows are examples: {counts.num_tokens:,} tokens, of "
        f"which {counts.num_loss_tokens:,} bear loss"
    ]
    if counts.num_truncated_rows:
        lines.append(
            f"cut to {seq_len:,} tokens: {count_rows(counts.num_truncated_rows)}, which "
            f"{'loses' if counts.num_truncated_rows == 1 else 'lose'} {counts.num_truncated_tokens:,}"
        )
    if counts.num_rows_without_loss:
        lines.append(
            f"left out: {count_rows(counts.num_rows_without_loss)} without a token that bears loss "
            f"({counts.named_rows_without_loss})"
        )
    if counts.num_bad_rows:
        lines.append(describe_skipped_rows(counts))
    return lines


def describe_skipped_rows(counts: RowCounts) -> str:
    """Return how many malformed rows are skipped, and the first of them with the reasons."""
    return f"skipped: {count_rows(counts.num_bad_rows, 'malformed row')} ({name_rows(counts.bad_rows)})"


def count_rows(number: int, noun: str = "row") -> str:
    """Return the number and the noun, such as "1 row" or "2,000 rows"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenTable:
    """Examples one after another; example ``i`` has the tokens ``offsets[i]`` to ``offsets[i + 1]``."""

    ids: TokenIds
    """Token ids, int32, shape ``[num_tokens]``."""
    bears_loss: BoolArray
    """Whether each token bears loss, shape ``[num_tokens]``."""
    offsets: OffsetArray
    """Int64, shape ``[num_examples + 1]``."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> TokenizedExample:
        start, end = self.offsets[index], self.offsets[index + 1]
        return self.ids[start:end], self.bears_loss[start:end]

    def save(self, folder: Path) -> None:
        """Write the three arrays into ``folder``."""
        import numpy

        folder.mkdir(parents=True, exist_ok=True)
        numpy.save(folder / IDS, self.ids)
        numpy.save(folder / LOSS, self.bears_loss)
        numpy.save(folder / OFFSETS, self.offsets)

    @classmethod
    def load(cls, folder: Path) -> TokenTable:
        """Return the table of ``folder``, mapped into memory: ranks of one machine share its pages."""
        import numpy

        ids, bears_loss, offsets = (
            numpy.load(folder / name, mmap_mode="r", allow_pickle=False) for name in (IDS, LOSS, OFFSETS)
        )
        return cls(ids=ids, bears_loss=bears_loss, offsets=offsets)


def count_shared_examples(training: TokenTable, validation: TokenTable, num_sides: int = 1) -> int:
    """Return how many examples for validation have the same tokens as one for training.

    ``num_sides`` entries of the tables are one example: 2 for preference pairs.
    """
    known = set(_hash_examples(training, num_sides))
    return sum(number in known for number in _hash_examples(validation, num_sides))


def _hash_examples(table: TokenTable, num_sides: int) -> Iterator[int]:
    # Hashes of 8 bytes: the tokens themselves may be gigabytes.
    for start in range(0, len(table), num_sides):
        yield hash(tuple(table[start + side][0].tobytes() for side in range(num_sides)))


def build_table(encoded: Iterator[tuple[int, Encoded]]) -> TokenTable:
    """Return the table of all examples."""
    import numpy

    # Chunks of arrays: a list of Python integers would take 28 bytes a token.
    ids, bears_loss, lengths = [], [], [0]
    for _, example in encoded:
        ids.append(numpy.asarray(example.ids, dtype=numpy.int32))
        bears_loss.append(numpy.asarray(example.bears_loss, dtype=numpy.bool_))
        lengths.append(len(example.ids))
    return TokenTable(
        ids=numpy.concatenate(ids) if ids else numpy.zeros(0, dtype=numpy.int32),
        bears_loss=numpy.concatenate(bears_loss) if ids else numpy.zeros(0, dtype=numpy.bool_),
        offsets=numpy.cumsum(lengths, dtype=numpy.int64),
    )
