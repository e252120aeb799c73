"""Output of commands: JSON for programs, tables and paragraphs of 80 columns for people."""

from __future__ import annotations

import codecs
import json
import math
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from shlex import quote

from shardscope.core.errors import refuse
from shardscope.machine.user_folders import check_home

WIDTH = 80
MIN_WIDTH = 8
"""Smallest width of a wrapped column; it is at least as wide as the first word of each cell."""


def print_json(value: object) -> None:
    """Print ``value`` as one JSON document. Numbers that JSON does not have are null."""
    document = _clean(value)
    text = json.dumps(document, indent=2, ensure_ascii=False)
    # JSON is UTF-8: in other locales, and for paths that are no UTF-8, only its own escapes are valid.
    is_utf8 = codecs.lookup(sys.stdout.encoding or "utf-8").name == "utf-8"
    if not is_utf8 or any("\ud800" <= letter <= "\udfff" for letter in text):
        text = json.dumps(document, indent=2)
    print(text)


def _clean(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    # numpy's and pandas's scalars become Python's.
    if hasattr(value, "item"):
        value = value.item()
    if value is None or value != value or (isinstance(value, float) and math.isinf(value)):
        return None
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, Path) else value


def print_text(text: str, indent: str = "") -> None:
    """Print each line of ``text`` wrapped; all that comes after the first line starts with ``indent``."""
    for number, line in enumerate(text.splitlines() or [""]):
        wrapped = textwrap.fill(
            line,
            WIDTH,
            initial_indent=indent if number else "",
            # Below the text of a list's item, not below its sign.
            subsequent_indent=indent + "  " * line.startswith("- "),
            break_long_words=False,
            break_on_hyphens=False,
        )
        print(wrapped)


def print_error(text: str) -> None:
    """Print lines on standard error, if it can be written."""
    # An exit code is not lost because the disk of its log is full.
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def discard_output() -> None:
    """Discard all further output, because Python complains about a closed pipe when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_fields(fields: Mapping[str, object]) -> None:
    """Print names and values, one a line; those that are empty or None are left out."""
    shown = {name: str(value) for name, value in fields.items() if value not in (None, "")}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        print_text(f"{name:<{width}}  {value}", " " * (width + 2))


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]], wrap: Sequence[str] = ()) -> None:
    """Print a table. The columns ``wrap`` break at spaces, the first ones first, if it is wider than 80
    columns."""
    cells = [[_format_cell(value) for value in row] for row in rows]
    is_text = [any(isinstance(row[index], str) for row in rows) for index in range(len(head))]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    wrapped = [head.index(name) for name in wrap]
    for index in wrapped:
        excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
        if excess > 0:
            first_words = [line[index].partition(" ")[0] for line in (head, *cells)]
            least = max(MIN_WIDTH, *map(len, first_words))
            widths[index] = min(widths[index], max(widths[index] - excess, least))
    for line in (head, *cells):
        cell_lines = [
            _wrap_cell(cell, widths[at]) if at in wrapped else [cell] for at, cell in enumerate(line)
        ]
        # A word that is wider than its column goes below the cells on its right, where it has the whole line.
        for at, (lines, width) in enumerate(zip(cell_lines, widths, strict=True)):
            height = max(map(len, cell_lines[at + 1 :]), default=0)
            first = next((number for number, text in enumerate(lines) if len(text) > width), height)
            lines[first:first] = [""] * (height - first)
        # Cells of one line are empty on the further lines of the wrapped ones.
        for texts in zip_longest(*cell_lines, fillvalue=""):
            columns = zip(texts, widths, is_text, strict=True)
            print(
                "  ".join(
                    text.ljust(width) if left else text.rjust(width) for text, width, left in columns
                ).rstrip()
            )


def _wrap_cell(cell: str, width: int) -> list[str]:
    return textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)


def _format_cell(value: object) -> str:
    if value is None or value != value:  # NaN, pandas's missing number, differs from itself.
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def find_output_file(option: str, text: str | None, name: str) -> Path | None:
    """Return the path of a file to write, ``name`` in a folder; None without it. Raises ``ValueError``."""
    if text is None:
        return None
    if not text:  # An empty variable of a script; the path would be the current folder.
        refuse(option, text, "the path of a file or of a folder", f"{option} {name}")
    path = check_home(option, text, f"{option} {name}")
    path = path / name if path.is_dir() else path
    if not path.parent.is_dir():
        refuse(
            option, text, f"a path in a folder; {path.parent} is none", f"mkdir -p {quote(str(path.parent))}"
        )
    return path
