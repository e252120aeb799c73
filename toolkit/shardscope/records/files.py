"""The small files of a run: JSON lines that are appended, JSON files that are replaced, and their readers.

Every file is valid JSON, although a loss may be NaN: NaN and the infinities are written as the strings
"NaN", "Infinity" and "-Infinity", and :func:`finite_or_special` turns them back into floats. Tokens and keys
are written as asterisks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shardscope.machine.os_errors import is_absent
from shardscope.machine.processes import start_of
from shardscope.records.json_values import parse_object
from shardscope.records.redaction import redactor
from shardscope.records.regular_files import (
    NotRegularFileError,
    check_regular,
    is_hole,
    open_new,
    open_to_append,
    open_to_change,
    open_to_read,
    skip_hole,
)

SPECIAL_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
MAX_RECORD_BYTES = 2**24
"""Of a JSON file, and of one line in a file of JSON lines: a traceback of a megabyte is the largest."""
MAX_LINES_BYTES = 2**26
"""Read of a file of JSON lines that is no rank's metrics: transitions, exits, samples of cards."""
PIECE_BYTES = 2**22
"""Read at a time."""
RESERVED = ("step", "rank", "time")
"""Names of a record of metrics that no metric can have."""


def encode(record: dict[str, Any], as_is: Collection[str] = ()) -> bytes:
    """``record`` as one line of JSON with its newline; secrets stay in the values named ``as_is``."""
    redact = redactor()
    clean = {
        redact(str(name)): _jsonable(item, str if name in as_is else redact) for name, item in record.items()
    }
    return (json.dumps(clean, allow_nan=False, ensure_ascii=False) + "\n").encode(errors="replace")


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one record. One write call, so lines of several writers never mix. Raises ``OSError``."""
    with open_to_append(path) as file:
        os.write(file.fileno(), encode(record))


def write_json(path: Path, record: dict[str, Any], as_is: Collection[str] = ()) -> None:
    """Replace ``path`` as a whole: a reader sees the old record or the new one. Raises ``OSError``.

    ``as_is``: what a process acts on later, and so keeps even what looks like a secret: paths, say.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open_new(partial) as file:
            file.write(encode(record, as_is))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, IsADirectoryError):
            check_regular(path)  # Of a damaged run folder, which that says in words.
        raise


def keep_json(path: Path, record: dict[str, Any]) -> None:
    """The same, and where a full disk has no room for a second file, over the one that is there.

    Of that, a short record's block is its own already. Raises ``OSError`` where even that is refused.
    """
    try:
        write_json(path, record)
    except OSError:
        with open_to_change(path) as file:
            file.write(encode(record))
            file.truncate()


def delete_halves(folder: Path) -> None:
    """Delete what :func:`write_json` of killed processes left in ``folder`` and the folders in it."""
    for path in (*folder.glob(".*"), *folder.glob("*/.*")):
        pid = path.suffix[1:]
        if pid.isdecimal() and start_of(int(pid)) is None:
            path.unlink(missing_ok=True)


def load_json(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Return the bytes of a JSON file. Raises ``OSError``, and ``ValueError`` for a larger one."""
    with open_to_read(path) as file:
        # read() takes the memory of its argument at once.
        data = file.read(min(max_bytes, os.fstat(file.fileno()).st_size) + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes / 2**20:,.0f} MiB")
    return data


def read_json(path: Path) -> dict[str, Any] | None:
    """The record in ``path``, or None if it is missing, no regular file, half written or no JSON object."""
    try:
        return read_present_json(path)
    except OSError:
        return None


def read_present_json(path: Path) -> dict[str, Any] | None:
    """The same for decisions that depend on absence. Raises ``OSError`` where the file cannot be read now."""
    try:
        return parse_object(load_json(path))
    except (ValueError, RecursionError):  # Among them what is no regular file.
        return None
    except OSError as error:
        if not is_absent(error):
            raise
        return None


def finite_or_special(value: Any) -> Any:
    """A float for the three special strings, anything else as it is."""
    return SPECIAL_FLOATS.get(value, value) if isinstance(value, str) else value


class Lines(NamedTuple):
    """What is in a part of a file of JSON lines."""

    records: list[dict[str, Any]]
    num_malformed: int
    """Lines that are no JSON object."""


def parse_lines(data: bytes) -> Lines:
    """Parse whole lines."""
    records, num_malformed = [], 0
    for line in data.splitlines():
        try:
            records.append(parse_object(line))
        except (ValueError, RecursionError):
            num_malformed += bool(line.strip())
    return Lines(records, num_malformed)


class LineTail:
    """Reads the JSON lines that were appended to a file since the last call.

    A last line without its newline waits for the rest; lines that are no JSON object are skipped and counted
    in ``num_malformed``; a file that is missing, no regular file, or vanished with its folder, has no lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_malformed = 0
        self.offset = 0
        self.num_restarts = 0
        """How often the file was shorter than what had been read of it, and so was read anew."""
        self.unreadable: OSError | None = None
        """Why the last read returned nothing, where the file may be there all the same."""

    def read(self, up_to: int | None = None) -> list[dict[str, Any]]:
        """New complete records, oldest first, not reading past byte ``up_to`` if it is given."""
        records: list[dict[str, Any]] = []
        for lines in self.pieces(up_to):
            found = parse_lines(lines)
            self.num_malformed += found.num_malformed
            records += found.records
        return records

    def pieces(self, up_to: int | None = None) -> Iterator[bytes]:
        """The same as bytes: whole lines, some megabytes at a time."""
        self.unreadable = None
        try:
            with open_to_read(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self.offset:  # Replaced by a shorter file: somebody restored or copied the folder.
                    self.offset = 0
                    self.num_restarts += 1
                yield from self._pieces(file, size if up_to is None else min(size, up_to))
        except OSError as error:  # What was read up to then counts.
            self.unreadable = None if is_absent(error) or isinstance(error, NotRegularFileError) else error

    def _pieces(self, file: BinaryIO, end: int) -> Iterator[bytes]:
        rest = b""
        while (place := self.offset + len(rest)) < end:
            file.seek(place)
            piece = file.read(min(PIECE_BYTES, end - place))
            if not piece:
                return
            if is_hole(piece):
                self.num_malformed += 1
                self.offset, rest = min(end, skip_hole(file, place + len(piece))), b""
                continue
            lines, newline, rest = (rest + piece).rpartition(b"\n")
            self.offset += len(lines) + len(newline)
            if lines:
                yield lines
            if len(rest) > MAX_RECORD_BYTES:
                self.num_malformed += 1
                self.offset, rest = self.offset + len(rest), b""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every complete record of ``path``, of its first :data:`MAX_LINES_BYTES`."""
    return LineTail(path).read(MAX_LINES_BYTES)


def read_tail(path: Path, max_bytes: int) -> bytes:
    """The last ``max_bytes`` of a file; empty if it is missing or no regular file."""
    try:
        with open_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - max_bytes))
            return file.read(min(size, max_bytes))
    except OSError:
        return b""


def read_tail_text(path: Path, max_bytes: int) -> str:
    """The same as text; bytes that are no UTF-8 become the replacement character."""
    return read_tail(path, max_bytes).decode(errors="replace")


def _jsonable(value: Any, words: Callable[[str], str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {words(str(key)): _jsonable(item, words) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item, words) for item in value]
    if value is None or isinstance(value, int | float):
        return value
    return words(str(value))
