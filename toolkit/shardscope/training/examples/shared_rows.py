"""Rows of the validation data that are trained on as well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardscope.training.examples.formats import Format, read_example
from shardscope.training.examples.rows import Rows

MAX_COMPARED_ROWS = 50_000
"""Maximum rows that a preview compares, which takes about a second. A run compares the tokens of all."""


def count_shared_rows(
    training: tuple[Rows, Format, Sequence[int]], validation: tuple[Rows, Format, Sequence[int]]
) -> int | None:
    """Return the number of validation rows with the text of a training row; None for too many rows.

    Both are the rows of a source, their format, and the indices of those that are read. Malformed rows count
    as different.
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
