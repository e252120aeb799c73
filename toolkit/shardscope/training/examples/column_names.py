"""Names of columns: those of row numbers, and the first line of a CSV file, which may be a row instead."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from shardscope.training.examples.file_rows import DELIMITERS, find_delimiter

NUMBER_NAME = re.compile(
    r"(?i:unnamed: \d+|idx|index|nr|no|num|number|row|#|(.*[_ -])?(id|uuid|guid))"
    r"|.*[a-z](Id|ID|Uuid|UUID|Guid|GUID)"
)
"""Names of columns that number rows; pandas' own for a column without a name is the first. In camel case the
last word has a capital: "questionId" is one, "grid" is not."""
NUMBER = re.compile(r"[-+]?\d+([.,]\d+)*")
SENTENCE_END = (".", "?", "!", "…")
WIDE_SENTENCE_END = ("。", "？", "！")
"""Ends of sentences in Chinese and Japanese, which have no spaces."""
INDEX_NAME = "Unnamed: 0"
"""pandas' name for a first column without one, such as the index that ``DataFrame.to_csv`` writes."""
MAX_NAME_CHARACTERS = 60
"""Longest column name that no sentence is suspected in."""
MAX_QUESTION_CHARACTERS = 1000
"""Longest name that an error repeats: a survey's question is shorter, a document may have any length."""


def list_text_columns(column_names: Sequence[str]) -> list[str]:
    """Return the columns that a mapping suggests, in order: those whose names are not of row numbers.

    Row numbers come first in many tables. All columns, if none is left.
    """
    names = [name for name in column_names if not NUMBER_NAME.fullmatch(name.strip())]
    return names or list(column_names)


def _suggest_header(cells: Sequence[str]) -> list[str]:
    """Return names for the cells of a first line without names: a known format, and other columns."""
    names = ["text"] if len(cells) == 1 else ["prompt", "completion"]
    # A number before two texts counts the rows.
    if len(cells) > 2 and NUMBER.fullmatch(cells[0]):
        names.insert(0, "id")
    return names + [f"column_{number}" for number in range(len(names) + 1, len(cells) + 1)]


def find_first_row(column_names: Sequence[str], files: Sequence[Path]) -> tuple[str, str]:
    """Return the header of CSV files if it may be a row, and one with names; else empty texts.

    One of its names is a sentence, which a survey's question is too, or a number among texts.
    """
    if not files or files[0].suffix.lower() not in DELIMITERS or column_names[0] == INDEX_NAME:
        return "", ""
    names = [name.strip() for name in column_names]
    # Numbers alone are the names of pandas' columns that have none. A column of row numbers may be first.
    are_numbers = [bool(NUMBER.fullmatch(name)) for name in list_text_columns(names)]
    if not any(map(_is_sentence, names)) and (all(are_numbers) or not any(are_numbers)):
        return "", ""
    delimiter = find_delimiter(files[0])
    line = delimiter.join(names)
    short = line if len(line) <= MAX_NAME_CHARACTERS else f"{line[: MAX_NAME_CHARACTERS - 1]}…"
    return short, delimiter.join(_suggest_header(names))


def _is_sentence(name: str) -> bool:
    is_long = len(name) > MAX_NAME_CHARACTERS or "\n" in name
    return is_long or name.endswith(WIDE_SENTENCE_END) or (" " in name and name.endswith(SENTENCE_END))


def quote_name(name: str) -> str:
    """Return a column name as Python has it: a cell of a spreadsheet may have line breaks and quotes."""
    short = name if len(name) <= MAX_QUESTION_CHARACTERS else f"{name[: MAX_QUESTION_CHARACTERS - 1]}…"
    return json.dumps(short, ensure_ascii=False)
