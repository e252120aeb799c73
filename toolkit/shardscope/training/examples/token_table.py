"""Token ids and loss masks of all examples of a data source, cut to the sequence length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias

from shardscope.core.errors import refuse
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

BadRows: TypeAlias = Literal["refuse", "skip"]
"""What happens to a malformed row: the whole data is refused, or the row is left out and counted."""
BAD_ROWS: tuple[BadRows, ...] = ("refuse", "skip")
MAX_NAMED_ROWS = 5
"""Maximum number of bad rows that a message names."""
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
    bad_rows: list[str] = field(default_factory=list)
    """The first malformed rows with their reasons, such as "row 3: completion is empty"."""
    num_bad_rows: int = 0
    num_rows_without_loss: int = 0
    """Rows left out because truncation cut off all tokens that bear loss."""
    rows_without_loss: list[int] = field(default_factory=list)
    """Numbers of the first of these rows, from 1."""

    def leave_out(self, index: int) -> None:
        """Count the row ``index`` as one without a token that bears loss."""
        self.num_rows_without_loss += 1
        if len(self.rows_without_loss) < MAX_NAMED_ROWS:
            self.rows_without_loss.append(index + 1)

    def skip(self, rows: Rows, index: int, error: ValueError) -> None:
        """Count the row ``index`` of ``rows`` as a malformed one."""
        self.num_bad_rows += 1
        if len(self.bad_rows) < MAX_NAMED_ROWS:
            self.bad_rows.append(f"{describe_place(rows, index)}: {error}")

    @property
    def named_rows_without_loss(self) -> str:
        """Numbers of the first rows without loss for messages, such as "rows 3, 8 and 4 more"."""
        named = ", ".join(f"{number:,}" for number in self.rows_without_loss)
        more = self.num_rows_without_loss - len(self.rows_without_loss)
        return f"row{'s' * (self.num_rows_without_loss > 1)} {named}" + (
            f" and {more:,} more" if more else ""
        )


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
) -> Iterator[tuple[int, Encoded]]:
    """Yield the index and the tokens of every example that can be trained on, and update ``counts``.

    A preference pair is yielded twice: its chosen side, then its rejected one. ``indices`` are those of the
    rows to read; None: all. ``lengths`` gets the number of tokens before truncation. Rows without a token
    that bears loss after truncation to ``seq_len`` (None: no truncation) are left out and counted, and pairs
    whose sides are then the same. Raises ``ValueError`` naming ``field`` and the row for a malformed row, if
    ``bad_rows`` is "refuse".
    """
    is_pair = format.name == "preference"
    for index in range(len(rows)) if indices is None else indices:
        counts.num_rows += 1
        try:
            example = read_example(format, rows[index])
            sides = encoder.encode_pair(example) if is_pair else (encoder.encode(example),)
        except ValueError as error:
            if bad_rows == "refuse":
                _refuse_row(field, describe_place(rows, index), rows[index], error)
            counts.skip(rows, index, error)
            continue
        cut = [side if seq_len is None else side.truncate(seq_len) for side in sides]
        for side, kept in zip(sides, cut, strict=True):
            if lengths is not None:
                lengths.append(len(side.ids))
            if len(kept.ids) < len(side.ids):
                counts.num_truncated_rows += 1
                counts.num_truncated_tokens += len(side.ids) - len(kept.ids)
        # trl trained on such rows silently: their mean loss is over no token (trl issues 3728 and 3927).
        if not all(side.num_loss_tokens for side in cut) or (is_pair and cut[0].ids == cut[1].ids):
            counts.leave_out(index)
            continue
        counts.num_examples += 1
        for side in cut:
            counts.num_tokens += len(side.ids)
            counts.num_loss_tokens += side.num_loss_tokens
            yield index, side


def check_row(field: str, format: Format, index: int, rows: Rows) -> None:
    """Raise ``ValueError`` naming ``field`` and the row if the row is malformed. Tokenizes nothing."""
    row = rows[index]
    try:
        read_example(format, row)
    except ValueError as error:
        _refuse_row(field, describe_place(rows, index), row, error)


def _refuse_row(field: str, place: str, row: Row, error: ValueError) -> NoReturn:
    shown = str(dict(row))
    shown = shown if len(shown) <= 120 else f"{shown[:117]}..."
    fix = f"repair {place}, or {field.partition('.')[0]}(bad_rows='skip')"
    if isinstance(error, ExampleError):
        fix = error.fix
    allowed = f"rows of one format. {place[0].upper()}{place[1:]}: {error} ({shown})"
    refuse(field, f"data whose {place} is malformed", allowed, fix, f"{place}: {error}")


def check_examples(field: str, counts: RowCounts, seq_len: int | None) -> None:
    """Raise ``ValueError`` naming ``field`` if no row can be trained on."""
    if counts.num_examples:
        return
    if counts.num_rows_without_loss:
        refuse(
            field,
            f"{count_rows(counts.num_rows_without_loss)} without a token that bears loss",
            f"rows whose completion starts within the first {seq_len:,} tokens; too late in "
            f"{counts.named_rows_without_loss}",
            f"a larger Recipe.seq_len than {seq_len:,}, or shorter prompts",
        )
    named = "; ".join(counts.bad_rows)
    refuse(
        field,
        f"{counts.num_rows:,} rows, all malformed ({named})",
        "at least one readable row",
        "repair them",
    )


def describe_counts(counts: RowCounts, seq_len: int) -> list[str]:
    """Return clauses for the log: the examples, and the rows that are cut or left out."""
    lines = [
        f"{counts.num_examples:,} of {counts.num_rows:,} rows are examples: {counts.num_tokens:,} tokens, of "
        f"which {counts.num_loss_tokens:,} bear loss"
    ]
    if counts.num_truncated_rows:
        lines.append(
            f"{counts.num_truncated_rows:,} rows are cut to {seq_len:,} tokens and lose "
            f"{counts.num_truncated_tokens:,}"
        )
    if counts.num_rows_without_loss:
        lines.append(
            f"left out: {count_rows(counts.num_rows_without_loss)}, whose tokens that bear loss are all cut "
            f"off ({counts.named_rows_without_loss})"
        )
    if counts.num_bad_rows:
        lines.append(describe_skipped_rows(counts))
    return lines


def describe_skipped_rows(counts: RowCounts) -> str:
    """Return how many malformed rows are skipped, and the first of them with the reasons."""
    return f"skipped: {count_rows(counts.num_bad_rows, 'malformed row')} ({'; '.join(counts.bad_rows)})"


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
