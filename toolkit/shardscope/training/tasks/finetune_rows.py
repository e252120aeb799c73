"""Rows of a fine-tune's data sources: which are for training and which for validation, and their format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardscope.core.errors import Fix, refuse
from shardscope.training.data.batches import split_rows
from shardscope.training.examples.formats import Format, read_example, recognize_format
from shardscope.training.examples.rows import Rows, open_rows
from shardscope.training.examples.streamed_rows import read_first_rows
from shardscope.training.examples.token_table import BadRows
from shardscope.training.preferences.settings import Objective

MAX_COMPARED_ROWS = 50_000
"""Maximum rows that a preview compares, which takes about a second. A run compares the tokens of all."""


@dataclass(frozen=True, kw_only=True)
class FinetuneRows:
    """The rows of ``data`` and ``validation`` of a :class:`Finetune`, opened again at each call.

    The fields are those of the task. Errors name them, such as ``Finetune.data``.
    """

    task: str
    """Name of the task in errors."""
    data: object
    validation: object
    columns: Mapping[str, str] | None
    objective: Objective
    bad_rows: BadRows
    streaming: bool
    seed: int
    max_seq_len: int | None = None
    """The model's longest sequence, for suggested fixes; None: not known."""

    def name_field(self, name: str) -> str:
        """Return the name of a field in error messages."""
        return f"{self.task}.{name}"

    def open(self, name: str = "data") -> Rows:
        """Return the rows of the source in the field ``name``; of a streamed one, the first rows."""
        if name == "validation":
            return self._open(name, self.validation)
        if self.streaming:
            return read_first_rows(self.name_field(name), self.data)
        return self._open(name, self.data)

    def _open(self, name: str, source: object) -> Rows:
        return open_rows(self.name_field(name), source, skips_unreadable=self.bad_rows == "skip")

    def recognize_format(self, rows: Rows, name: str = "data") -> Format:
        """Return the format of the rows in the field ``name``. Raises ``ValueError`` if it is not the
        objective's."""
        field = self.name_field(name)
        format = recognize_format(field, rows.column_names, self.columns, rows=rows)
        if (format.name == "preference") != (self.objective == "dpo"):
            is_pair = format.name == "preference"
            kind = 'preference pairs (prompt, chosen, rejected) with objective="dpo"'
            allowed = 'rows with one answer with objective="sft"' if is_pair else kind
            value = f"data of the format {format.title}"
            # The objective is that of the training data, which have been recognized before.
            fix: Fix = {"objective": "dpo" if is_pair else "sft"}
            if name == "validation":
                fix = f"rows like those of {self.name_field('data')}"
            refuse(field, value, allowed, fix)
        return format

    def find_prompt_rows(self) -> tuple[str, list[int] | None]:
        """Return the field whose rows have the prompts, and the indices of these rows; None: all."""
        if isinstance(self.validation, float):
            return "data", split_rows(len(self.open()), self.validation, self.seed)[1]
        return ("data" if self.validation is None else "validation"), None

    def count_shared(self, rows: Rows) -> int | None:
        """Return how many rows for validation are also among ``rows`` for training, those of ``data``.

        None if they are not compared: streamed rows, and too many. Malformed rows count as different.
        """
        if self.validation is None or self.streaming:
            return 0 if self.validation is None else None
        format = self.recognize_format(rows)
        if isinstance(self.validation, float):
            for_training, for_validation = split_rows(len(rows), self.validation, self.seed)
            return _count_shared_rows((rows, format, for_training), (rows, format, for_validation))
        others = self.open("validation")
        other_format = self.recognize_format(others, "validation")
        return _count_shared_rows(
            (rows, format, range(len(rows))), (others, other_format, range(len(others)))
        )


def _count_shared_rows(
    training: tuple[Rows, Format, Sequence[int]], validation: tuple[Rows, Format, Sequence[int]]
) -> int | None:
    """Return the number of validation rows with the text of a training row; None for too many rows.

    Both are the rows of a source, their format, and the indices of those that are read.
    """
    if len(training[2]) + len(validation[2]) > MAX_COMPARED_ROWS:
        return None
    known = set(_hash_rows(*training))
    return sum(number in known for number in _hash_rows(*validation))


def _hash_rows(rows: Rows, format: Format, indices: Sequence[int]) -> Iterator[int]:
    for index in indices:
        try:
            example = read_example(format, rows[index])
        except ValueError:
            continue
        yield hash(repr(example))
