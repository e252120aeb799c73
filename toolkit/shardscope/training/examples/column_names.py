"""Names of columns: those of the roles of each format and of row numbers, and the first line of a CSV file,
which may be a row instead."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

from shardscope.core.errors import Fix, Value
from shardscope.core.number_format import join_list
from shardscope.training.examples.file_rows import DELIMITERS, find_delimiter

FormatName: TypeAlias = Literal["text", "prompt-completion", "instruction", "messages", "preference"]
ROLES: dict[FormatName, tuple[str, ...]] = {
    "preference": ("prompt", "chosen", "rejected"),
    "messages": ("messages",),
    "instruction": ("instruction", "input", "output"),
    "prompt-completion": ("prompt", "completion"),
    "text": ("text",),
}
"""Format -> the roles of its columns, in the order in which formats are tried."""
OPTIONAL_ROLES = {("preference", "prompt"), ("instruction", "input")}
"""Roles that may have no column: pairs of whole conversations have no prompt; Alpaca's input is optional."""
# Column names of public data sets, the format's own name first. instruction and prompt-completion differ only
# in the optional input.
COLUMN_NAMES: dict[str, tuple[str, ...]] = {
    "text": ("text", "content"),
    "prompt": ("prompt", "question", "query", "instruction", "problem", "user"),
    "completion": ("completion", "answer", "response", "output", "solution", "assistant", "target"),
    "instruction": ("instruction",),
    "input": ("input", "context"),
    "output": ("output", "response"),
    "messages": ("messages", "conversations", "conversation"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
}

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


def list_formats() -> str:
    """Return the formats with their roles for messages."""
    return "; ".join(f"{name}: {', '.join(roles)}" for name, roles in ROLES.items())


def find_column(role: str, column_names: Sequence[str]) -> str | None:
    """Return the column that has a usual name of ``role``; None if there is none."""
    # Tables written by hand have spaces around their names.
    by_lower_case = {name.strip().lower(): name for name in column_names}
    return next((by_lower_case[name] for name in COLUMN_NAMES[role] if name in by_lower_case), None)


def suggest_mapping(column_names: Sequence[str], columns: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the nearest valid mapping to the one in ``columns``, as the user would type it.

    It is one of the format with most of the roles in ``columns``; without any, of a text, or of a prompt and
    a completion.
    """
    names, mapped = list_text_columns(column_names), list(columns.values())
    format: FormatName = "text" if len(names) == 1 else "prompt-completion"
    if columns:
        # Of several, the one with the fewest roles to add.
        format = min(
            ROLES,
            key=lambda name: (
                -len(set(columns) & set(ROLES[name])),
                len(set(_list_required_roles(name)) - set(columns)),
            ),
        )
    required = _list_required_roles(format)
    # Which of the roles with the same column is wrong is not known.
    repeated = [role for role, column in columns.items() if mapped.count(column) > 1]
    roles = [role for role in ROLES[format] if role in columns or role in required]
    if len(names) < len(roles):
        roles = [role for role in roles if role in required or role not in repeated]
    chosen = {role: columns[role] for role in roles if role in columns and role not in repeated}
    free = [name for name in names if name not in chosen.values()]
    # Columns of roles that other formats have come first.
    others = [column for role, column in columns.items() if role not in ROLES[format]]
    free.sort(key=lambda name: name not in others)
    missing = [role for role in roles if role not in chosen]
    for role in missing if columns else ():
        if usual := find_column(role, free):
            chosen[role] = usual
            free.remove(usual)
    chosen.update(zip([role for role in missing if role not in chosen], free, strict=False))
    if len(chosen) < len(roles):
        if len(names) > 1 or format == "preference":
            return f"data with a column of its own for each of {join_list(roles)}"
        roles, chosen = ["text"], {"text": names[0]}
    pairs = ", ".join(f'"{role}": {quote_name(chosen[role])}' for role in roles)
    return f"columns={{{pairs}}}"


def _list_required_roles(format: FormatName) -> list[str]:
    return [role for role in ROLES[format] if (format, role) not in OPTIONAL_ROLES]


def suggest_role(role: str, column_names: Sequence[str], columns: Mapping[str, str]) -> Fix | None:
    """Return a fix of the unknown ``role`` in ``columns`` that is a usual column name of a known one.

    A role that fits the others, or a mapping if none does; None if the name is not a usual one.
    """
    meant = [known for known, names in COLUMN_NAMES.items() if role.lower() in names]
    others = {other for other in columns if other in COLUMN_NAMES}
    for known in meant:
        if known not in others and any({known, *others} <= set(roles) for roles in ROLES.values()):
            return Value(known)
    return suggest_mapping(column_names, columns) if meant else None
