"""Rows of local files: the position of each row, and copies in which unreadable lines are empty rows.

Imports neither torch nor ``datasets``.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TextIO, TypeAlias

from shardscope.core.errors import refuse
from shardscope.core.number_format import format_count

if TYPE_CHECKING:
    from _csv import Reader

    from shardscope.training.examples.rows import Row, Rows

JSON_LINES = (".jsonl", ".ndjson")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""Suffix -> usual delimiter of the cells."""
OTHER_DELIMITERS = (";", "\t", "|", ",")
"""Delimiters of files whose suffix promises another: spreadsheets write ";" where numbers have a comma."""
DELIMITER_LINE = re.compile(r"(?i)sep=.?")
"""First line that tells a spreadsheet the delimiter of the file, such as "sep=;"."""
CHUNK_BYTES = 2**20
MAX_CELL_CHARACTERS = 2**31 - 1
"""Longest cell of a CSV file; a larger limit is refused where a C long has 32 bits."""
FIRST_BYTES = 4096
"""Bytes at the beginning of a file that show whether it is in UTF-16."""
MAX_EMPTY_BYTES = 64
"""Size above which a JSON file is not read to see whether it is an empty array."""
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

ExtraCell: TypeAlias = Literal["", "index", "end", "every", "some"]
"""Cell that rows of a CSV file have and its header has not.

"index": row numbers at the beginning, as R and ``to_csv(index_label=False)`` write them. "end": an empty cell
after a delimiter at the end. "every", "some": other ones, in every row or only in some.
"""
EXTRA_CELLS: dict[ExtraCell, str] = {
    "index": "the header and the row number have",
    "end": "the header and the delimiter at the end have",
}
"""Words of a message for the cells of a row that has one more than the header."""


@dataclass(frozen=True, eq=False)
class FileRows:
    """The rows of files, which know their places in them."""

    rows: Rows
    files: Sequence[Path]

    @property
    def column_names(self) -> list[str]:
        return self.rows.column_names

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def describe_place(self, index: int) -> str:
        """Return the place of a row, such as "line 6 of a.jsonl"; "row 5" in files without lines of rows."""
        return describe_row(self.files, index)


def describe_place(rows: Rows, index: int) -> str:
    """Return the file and the line of a row, or its number, from 1."""
    describe = getattr(rows, "describe_place", None)  # ``datasets`` and lists have none.
    return f"row {index + 1}" if describe is None else str(describe(index))


def describe_row(files: Sequence[Path], index: int) -> str:
    """Return the place of a row of ``files`` that are read one after another, or its number, from 1."""
    place = find_place(files, index)
    return f"row {index + 1}" if place is None else f"line {place[1]} of {place[0].name}"


def find_place(files: Sequence[Path], index: int) -> tuple[Path, int] | None:
    """Return the file and the line, from 1, at which the row ``index`` of all files begins.

    None if it is not known: in JSON and Parquet a row is no line.
    """
    number = 0
    for path in files:
        if path.suffix.lower() not in (*JSON_LINES, *DELIMITERS):
            return None
        for line in _iterate_first_lines(path):
            if number == index:
                return path, line
            number += 1
    return None


def _iterate_first_lines(path: Path) -> Iterator[int]:
    """Yield the line at which each row of a file begins."""
    if path.suffix.lower() in JSON_LINES:
        with path.open("rb") as file:
            yield from (number for number, line in enumerate(file, start=1) if line.strip())
        return
    yield from (line for line, _ in itertools.islice(_iterate_table(path, find_delimiter(path)), 1, None))


def _iterate_table(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line at which each row of a CSV file begins, and its cells; the header is the first one."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = _divide_cells(file, delimiter)
        begins = reader.line_num + 1
        for row in reader:
            if not _is_blank(row):
                yield begins, row
            begins = reader.line_num + 1


def _is_blank(row: list[str]) -> bool:
    """Return whether pandas skips the line: one without a character, or of spaces only. A "" is a cell."""
    return not row or (len(row) == 1 and bool(row[0]) and not row[0].strip(" \t"))


def has_rows(path: Path) -> bool:
    """Return whether a data file has a row; also true for an unreadable one, which its parser reports.

    One without has only blank lines, only the header of a CSV file, an empty JSON array, or is an empty part
    of a Parquet set.
    """
    suffix = path.suffix.lower()
    if not path.stat().st_size:
        return False
    try:
        if suffix == ".parquet":
            import pyarrow.parquet as parquet

            return bool(parquet.read_metadata(path).num_rows)
        if suffix in (*JSON_LINES, *DELIMITERS):
            return next(_iterate_first_lines(path), None) is not None
        if suffix == ".json" and path.stat().st_size <= MAX_EMPTY_BYTES:
            return bool(json.loads(path.read_text(encoding="utf-8-sig")) != [])
    except (OSError, ValueError, csv.Error):  # Those of pyarrow and of decoding are ValueErrors.
        return True
    return True


def check_is_utf8(field: str, path: Path) -> None:
    """Raise ``ValueError`` naming ``field``, the file and its line if a text file is not in UTF-8."""
    if path.suffix.lower() == ".parquet":
        return
    check_begins_in_utf8(field, path)
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with path.open("rb") as file:
        while True:
            chunk = file.read(CHUNK_BYTES)
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                _refuse_encoding(field, path, error.object[error.start], line, "WINDOWS-1252")
            if not chunk:
                return
            line += chunk.count(b"\n")


def check_begins_in_utf8(field: str, path: Path) -> None:
    """Raise ``ValueError`` naming ``field`` and the file if a text file begins as one in UTF-16 does."""
    if path.suffix.lower() == ".parquet":
        return
    with path.open("rb") as file:
        first = file.read(FIRST_BYTES)
    if first.startswith(UTF16_MARKS):
        _refuse_encoding(field, path, first[0], 1, "UTF-16")
    if b"\0" in first:
        # Without a mark. Each character of a plain text has a zero byte, which UTF-8 would accept.
        name = "UTF-16BE" if first.startswith(b"\0") else "UTF-16LE"
        _refuse_encoding(field, path, 0, first[: first.index(b"\0")].count(b"\n") + 1, name)


def _refuse_encoding(field: str, path: Path, byte: int, line: int, encoding: str) -> NoReturn:
    name, target = shlex.quote(path.name), shlex.quote(f"{path.stem}-utf8{path.suffix}")
    refuse(
        field,
        str(path),
        f"text in UTF-8: byte 0x{byte:02x} in line {line:,} is not",
        f"iconv -f {encoding} -t UTF-8 {name} > {target}, or with the encoding that it has",
    )


def read_header(path: Path) -> list[str]:
    """Return the column names of a CSV or TSV file, with pandas' names for those without one."""
    return name_columns(split_header(path, find_delimiter(path)))


def name_columns(header: Sequence[str]) -> list[str]:
    """Return the names of a header's cells: spreadsheets and pandas' own index leave a name empty."""
    return [name or f"Unnamed: {index}" for index, name in enumerate(header)]


def check_header(field: str, path: Path) -> None:
    """Raise ``ValueError`` naming ``field`` if a CSV file's header is no list of different names."""
    delimiter = find_delimiter(path)
    header = split_header(path, delimiter)
    line = delimiter.join(header).strip()
    if DELIMITER_LINE.fullmatch(line):
        allowed = f"column names in the first line: {line!r} there is a mark that only spreadsheets read"
        refuse(field, str(path), allowed, "remove the first line")
    # pandas would name the second one "name.1", and its cells would be ignored without a word.
    twice = next((name for name in header if name and header.count(name) > 1), None)
    if twice is not None:
        allowed = f"columns with different names: the header has {header.count(twice)} named {twice!r}"
        refuse(field, str(path), allowed, "rename or remove one of them")


def find_extra_cell(path: Path) -> ExtraCell:
    """Return which cell the rows of a CSV file have besides those of its header.

    Reads two rows of a usual file, and all rows of one whose first row is wider than the header: pandas takes
    the first column of such a file as an index, whatever it contains.
    """
    table = _iterate_table(path, find_delimiter(path))
    _, header = next(table, (0, list[str]()))
    first: int | None = None
    has_usual_width, ends_empty, number = False, True, 0
    for number, (_, row) in enumerate(table, start=1):
        if len(row) <= len(header):
            return "" if number == 1 else "some"
        if number == 1:
            first = {"0": 0, "1": 1}.get(row[0].strip())
        if first is not None and row[0].strip() != str(first + number - 1):
            first = None
        ends_empty = ends_empty and not row[-1].strip()
        has_usual_width = has_usual_width or len(row) == len(header) + 1
    if not number:
        return ""
    if not has_usual_width or (first is None and not ends_empty):
        return "every"
    return "end" if first is None else "index"


def count_cells(path: Path, extra: ExtraCell) -> int:
    """Return how many cells a row of a CSV file may have."""
    return len(split_header(path, find_delimiter(path))) + (extra in ("index", "end"))


def has_wide_first_row(path: Path, extra: ExtraCell) -> bool:
    """Return whether the first row below the header of a CSV file has too many cells.

    pandas does not refuse it as it does such rows further down: it moves all cells of the file.
    """
    rows = [row for _, row in itertools.islice(_iterate_table(path, find_delimiter(path)), 2)]
    return len(rows) == 2 and len(rows[1]) > count_cells(path, extra)


def check_table_rows(field: str, path: Path, *, skips_wide: bool) -> None:
    """Raise ``ValueError`` with the first line of a CSV file that cannot be read.

    pandas' messages count rows, not lines, where a cell has several lines. ``skips_wide``: rows with too many
    cells are left out later, unless all have too many. A quote that is never closed is always refused: the
    file would end there.
    """
    delimiter, extra = find_delimiter(path), find_extra_cell(path)
    num_cells = count_cells(path, extra)
    first_wide: tuple[int, int] | None = None
    line, row = 1, list[str]()
    for line, row in _iterate_table(path, delimiter):
        if len(row) > num_cells and first_wide is None:
            first_wide = line, len(row)
    # Before wide rows: the row with the open quote has fewer cells than the others of the file.
    if _has_open_quote(path, line, delimiter):
        lost = sum(cell.count("\n") for cell in row)
        allowed = (
            f"quotes that are closed; one in the row in line {line:,} is not, so that the rest of the file, "
            f"{lost:,} lines, is one cell"
        )
        refuse(field, str(path), allowed, f"close or remove the quote in line {line:,}")
    if first_wide is None or (skips_wide and extra != "every"):
        return
    line, num_wide = first_wide
    allowed = (
        f"rows of at most {format_count(num_cells, 'cell')}, as {EXTRA_CELLS.get(extra, 'the header has')}; "
    )
    quotes = f"a cell that contains {delimiter!r} needs quotes around it"
    if extra == "every":
        allowed += f"every row has more, the one in line {line:,} has {num_wide:,}"
        refuse(
            field, str(path), allowed, f"add a name for the first column to the header, or quotes: {quotes}"
        )
    allowed += f"the row in line {line:,} has {num_wide:,}"
    refuse(field, str(path), allowed, f"repair or remove line {line:,}: {quotes}")


def _has_open_quote(path: Path, last_line: int, delimiter: str) -> bool:
    """Return whether the last row of a CSV file, which begins at ``last_line``, ends inside of quotes."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = itertools.chain(itertools.islice(file, last_line - 1, None), ["x"])
        return len(list(csv.reader(lines, delimiter=delimiter))) < 2


def find_delimiter(path: Path) -> str:
    """Return the delimiter of a CSV or TSV file: the usual one, unless only another divides its header."""
    usual = DELIMITERS[path.suffix.lower()]
    if len(split_header(path, usual)) != 1:
        return usual
    return max((usual, *OTHER_DELIMITERS), key=lambda delimiter: len(split_header(path, delimiter)))


def split_header(path: Path, delimiter: str) -> list[str]:
    """Return the cells of a CSV file's header, divided at ``delimiter``."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        return next((row for row in _divide_cells(file, delimiter) if not _is_blank(row)), [])


def _divide_cells(file: TextIO, delimiter: str) -> Reader:
    # The limit of this process, 128 KiB unless somebody has changed it: a long document is one cell.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_CELL_CHARACTERS))
    return csv.reader(file, delimiter=delimiter)


def write_readable_copies(files: Sequence[Path], folder: Path) -> list[Path]:
    """Write copies of JSONL, CSV or TSV files in which each unreadable line is a row without a value.

    So the rows keep their numbers, and these are left out as malformed ones.
    """
    # With their own names, which errors of the copies contain.
    copies = [folder / str(number) / path.name for number, path in enumerate(files)]
    for path, copy in zip(files, copies, strict=True):
        copy.parent.mkdir()
        if path.suffix.lower() in JSON_LINES:
            with path.open("rb") as source, copy.open("wb") as target:
                target.writelines(line if _is_object(line) else b"{}\n" for line in source if line.strip())
            continue
        delimiter, extra = find_delimiter(path), find_extra_cell(path)
        num_cells = count_cells(path, extra)
        table = _iterate_table(path, delimiter)
        with copy.open("w", encoding="utf-8", newline="") as target:
            writer = csv.writer(target, delimiter=delimiter)
            _, header = next(table)
            writer.writerow(header)
            for _, row in table:
                is_readable = len(row) <= num_cells
                if extra == "index":
                    row = row[1:]
                writer.writerow(row[: len(header)] if is_readable else [""] * len(header))
    return copies


def _is_object(line: bytes) -> bool:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and find_half_pair(line, row) is None


def find_half_pair(line: bytes, value: object) -> str | None:
    r"""Return the first surrogate without its other half in a JSON line of ``value``, such as "\ud83d".

    None if there is none. Programs that cut texts by UTF-16 units write them; no UTF-8 has them, and Arrow's
    parser ends at the first one.
    """
    if b"\\u" not in line:
        return None
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        # As the line has it: hexadecimal digits of either case.
        written = re.search(re.escape(half).encode(), line, re.IGNORECASE)
        return written[0].decode() if written else half
    return None
