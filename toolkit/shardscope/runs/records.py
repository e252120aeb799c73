"""The small files of a run: JSON lines that are appended, JSON files that are replaced, and their readers.

Every file is valid JSON, although a loss may be NaN: NaN and the infinities are written as the strings
"NaN", "Infinity" and "-Infinity", and :func:`finite_or_special` turns them back into floats. Tokens and keys
are written as asterisks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

from shardscope.runs.os_errors import is_absent
from shardscope.runs.processes import start_of
from shardscope.runs.redaction import redactor

MAX_INT_DIGITS = 300
"""An integer with fewer digits is within float range, which ends at 1.8e308."""
SPECIAL_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(record: dict[str, Any], as_is: Collection[str] = ()) -> bytes:
    """``record`` as one line of JSON with its newline; secrets stay in the values named ``as_is``."""
    redact = redactor()
    clean = {
        redact(str(name)): _jsonable(item, str if name in as_is else redact) for name, item in record.items()
    }
    return (json.dumps(clean, allow_nan=False, ensure_ascii=False) + "\n").encode(errors="replace")


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one record. One write call, so lines of several writers never mix. Raises ``OSError``."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, encode(record))
    finally:
        os.close(descriptor)


def open_log(path: Path) -> BinaryIO:
    """``path`` for appending what a process prints, readable by this user only. Raises ``OSError``."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab")


def write_json(path: Path, record: dict[str, Any], as_is: Collection[str] = ()) -> None:
    """Replace ``path`` as a whole: a reader sees the old record or the new one. Raises ``OSError``.

    ``as_is``: what a process acts on later, and so keeps even what looks like a secret: paths, say.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(encode(record, as_is))
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def keep_json(path: Path, record: dict[str, Any]) -> None:
    """The same, and where a full disk has no room for a second file, over the one that is there.

    Of that, a short record's block is its own already. Raises ``OSError`` where even that is refused.
    """
    try:
        write_json(path, record)
    except OSError:
        with path.open("r+b") as file:
            file.write(encode(record))
            file.truncate()


def delete_halves(folder: Path) -> None:
    """Delete what :func:`write_json` of killed processes left in ``folder`` and the folders in it."""
    for path in (*folder.glob(".*"), *folder.glob("*/.*")):
        pid = path.suffix[1:]
        if pid.isdecimal() and start_of(int(pid)) is None:
            path.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """The record in ``path``, or None if it is missing, unreadable, half written or no JSON object."""
    try:
        return read_present_json(path)
    except OSError:
        return None


def read_present_json(path: Path) -> dict[str, Any] | None:
    """The same for decisions that depend on absence. Raises ``OSError`` where the file cannot be read now."""
    try:
        record = parse_json(path.read_bytes())
    except OSError as error:
        if is_absent(error):
            return None
        raise
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def parse_json(text: str | bytes) -> Any:
    """Parse one JSON value; an integer beyond float range becomes an infinity, as 1e400 does."""
    return json.loads(text, parse_int=_bounded_int)


def _bounded_int(text: str) -> int | float:
    return int(text) if len(text) < MAX_INT_DIGITS or math.isfinite(float(text)) else float(text)


def finite_or_special(value: Any) -> Any:
    """A float for the three special strings, anything else as it is."""
    return SPECIAL_FLOATS.get(value, value) if isinstance(value, str) else value


class LineTail:
    """Reads the JSON lines that were appended to a file since the last call.

    A last line without its newline waits for the rest; lines that are no JSON object are skipped and counted
    in ``num_malformed``; a file that is missing, or vanished with its folder, has no lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_malformed = 0
        self.offset = 0
        self.unreadable: OSError | None = None
        """Why the last read returned nothing, where the file may be there all the same."""

    def read(self, up_to: int | None = None) -> list[dict[str, Any]]:
        """New complete records, oldest first, not reading past byte ``up_to`` if it is given."""
        try:
            self.unreadable = None
            size = self.path.stat().st_size
            if size < self.offset:  # Replaced by a shorter file: somebody restored or copied the folder.
                self.offset = 0
            end = size if up_to is None else min(size, up_to)
            if end <= self.offset:
                return []
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(end - self.offset)
        except OSError as error:
            self.unreadable = None if is_absent(error) else error
            return []
        complete = data.rfind(b"\n") + 1
        self.offset += complete
        records = []
        for line in data[:complete].splitlines():
            try:
                record = parse_json(line.decode(errors="replace"))
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                records.append(record)
            elif line.strip():
                self.num_malformed += 1
        return records


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every complete record of ``path``."""
    return LineTail(path).read()


def read_tail_text(path: Path, max_bytes: int) -> str:
    """The last ``max_bytes`` of a log as text; bytes that are no UTF-8 become the replacement character."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - max_bytes))
            return file.read(max_bytes).decode(errors="replace")
    except OSError:
        return ""


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
