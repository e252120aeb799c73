"""Readers and writers of a run's small files: JSON lines (append-only) and JSON files (replaced atomically).

Every file is valid JSON although a loss may be NaN: NaN and the infinities are written as the strings "NaN",
"Infinity" and "-Infinity"; :func:`finite_or_special` converts them back to floats. Secrets are masked with
asterisks.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from shardscope.machine.os_errors import is_absent
from shardscope.machine.processes import identify_machine, read_start_time
from shardscope.records.json_values import parse_object
from shardscope.records.redaction import create_redactor
from shardscope.records.regular_files import (
    NotRegularFileError,
    check_regular,
    is_hole,
    open_new,
    open_to_append,
    open_to_change,
    open_to_read,
    size_of,
    skip_hole,
)

SPECIAL_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
MAX_RECORD_BYTES = 2**24
"""Largest JSON file, and largest line of a JSON lines file; real ones are tracebacks of up to 1 MB."""
MAX_LINES_BYTES = 2**26
"""Most bytes read of a JSON lines file without metrics: status transitions, exits, GPU samples."""
PIECE_BYTES = 2**22
"""Bytes per read call."""
RESERVED = ("step", "rank", "time")
"""Keys of a metrics record that no metric may use as its name."""


def encode(record: Mapping[str, object], as_is: Collection[str] = ()) -> bytes:
    """Return ``record`` as a JSON line with newline; secrets are masked except in values named ``as_is``."""
    # One redactor for the whole record: it reads the environment once.
    redact = create_redactor()
    clean = {
        redact(str(name)): _to_json_value(item, str if name in as_is else redact)
        for name, item in record.items()
    }
    return (json.dumps(clean, allow_nan=False, ensure_ascii=False) + "\n").encode(errors="replace")


def append_line(path: Path, record: Mapping[str, object]) -> None:
    """Append one record in a single write call, so that lines of several writers never interleave.

    Raises ``OSError``, also if only a part of the line was written, as on a disk that becomes full.
    """
    line = encode(record)
    # A writer may have left a part of a line. If the line of another writer is only not visible yet, an empty
    # line stays, which readers skip.
    if read_tail(path, 1) not in (b"", b"\n"):
        line = b"\n" + line
    with open_to_append(path) as file:
        # Not the rest in a second call: another writer may have appended a line meanwhile.
        if os.write(file.fileno(), line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def write_json(path: Path, record: Mapping[str, object], as_is: Collection[str] = ()) -> None:
    """Replace ``path`` atomically: a reader sees the old record or the new one. Raises ``OSError``.

    ``as_is`` names values that a process uses later, such as paths, which are never masked.
    """
    partial = partial_file(path)
    try:
        with open_new(partial) as file:
            file.write(encode(record, as_is))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, IsADirectoryError):
            check_regular(path)  # raises the error message for a damaged run folder
        raise


def write_json_on_full_disk(path: Path, record: Mapping[str, object]) -> None:
    """Write like :func:`write_json`, but overwrite the existing file in place if the disk is full.

    A short record fits into the block that the file has already. Raises ``OSError`` if that fails too.
    """
    try:
        write_json(path, record)
    except OSError:
        with open_to_change(path) as file:
            file.write(encode(record))
            file.truncate()


def partial_file(path: Path) -> Path:
    """Return the hidden file in which this thread writes what is to replace ``path``."""
    # In the same folder, because a rename is atomic only within one file system. Thread, machine and pid keep
    # writers apart; the last two are for delete_partial_files.
    own = f"{threading.get_ident()}.{_hash_machine()}.{os.getpid()}"
    return path.with_name(f".{path.name}.{own}")


def delete_partial_files(folder: Path) -> None:
    """Delete partial files of killed processes of this machine, in ``folder`` and its subfolders.

    Those of other machines, which share the folder, stay: whether they are still being written cannot be
    known here.
    """
    for path in (*folder.glob(".*"), *folder.glob("*/.*")):
        # A partial file of a living process is still being written.
        *_, machine, pid = path.name.rsplit(".", 2)
        if machine == _hash_machine() and pid.isdecimal() and read_start_time(int(pid)) is None:
            path.unlink(missing_ok=True)


def _hash_machine() -> str:
    return hashlib.blake2b(identify_machine().encode(), digest_size=6).hexdigest()


def load_json(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Return the bytes of a JSON file. Raises ``OSError``, and ``ValueError`` for a larger one."""
    with open_to_read(path) as file:
        # read(n) allocates n bytes at once, so n is limited by the file's size.
        data = file.read(min(max_bytes, os.fstat(file.fileno()).st_size) + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes / 2**20:,.0f} MiB")
    return data


def read_json(path: Path) -> dict[str, object] | None:
    """Return the record in ``path``; None if missing, not a regular file, incomplete or no JSON object."""
    try:
        return read_json_if_present(path)
    except OSError:
        return None


def read_json_if_present(path: Path) -> dict[str, object] | None:
    """Return the same, for decisions that depend on absence. Raises ``OSError`` if it cannot be read now."""
    try:
        return parse_object(load_json(path))
    except (ValueError, RecursionError):  # includes NotRegularFileError
        return None
    except OSError as error:
        if not is_absent(error):
            raise
        return None


def finite_or_special(value: object) -> object:
    """Return the float for "NaN", "Infinity" and "-Infinity", anything else unchanged."""
    return SPECIAL_FLOATS.get(value, value) if isinstance(value, str) else value


class Lines(NamedTuple):
    """Parsed JSON lines."""

    records: list[dict[str, object]]
    num_malformed: int
    """Number of lines that are not a JSON object."""


def parse_lines(data: bytes) -> Lines:
    """Parse complete JSON lines; count malformed ones."""
    records, num_malformed = [], 0
    for line in data.splitlines():
        try:
            records.append(parse_object(line))
        except (ValueError, RecursionError):
            num_malformed += bool(line.strip())
    return Lines(records, num_malformed)


class LineTail:
    """Incremental reader of a growing JSON lines file.

    A last line without newline is left for the next call. Lines that are not a JSON object are skipped and
    counted in ``num_malformed``. A file that is missing or not a regular file has no lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_malformed = 0
        self.offset = 0
        self.num_restarts = 0
        """How often the file had shrunk and was read from its beginning again."""
        self.unreadable: OSError | None = None
        """Error of the last read, if the file may exist but could not be read."""

    def read(self, up_to: int | None = None) -> list[dict[str, object]]:
        """Return new complete records, oldest first, up to byte ``up_to`` if it is given."""
        records: list[dict[str, object]] = []
        for lines in self.read_pieces(up_to):
            parsed = parse_lines(lines)
            self.num_malformed += parsed.num_malformed
            records += parsed.records
        return records

    def read_pieces(self, up_to: int | None = None) -> Iterator[bytes]:
        """Yield the new complete lines as bytes, some megabytes at a time."""
        self.unreadable = None
        try:
            with open_to_read(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self.offset:  # replaced by a shorter file: the folder was restored or copied
                    self.offset = 0
                    self.num_restarts += 1
                yield from self._read_pieces(file, size if up_to is None else min(size, up_to))
        except OSError as error:  # lines yielded before the error remain valid
            self.unreadable = None if is_absent(error) or isinstance(error, NotRegularFileError) else error

    def _read_pieces(self, file: BinaryIO, end: int) -> Iterator[bytes]:
        rest = b""
        # Only complete lines advance the offset: the rest of a piece is read again, or completed by the next
        # piece.
        while (position := self.offset + len(rest)) < end:
            file.seek(position)
            piece = file.read(min(PIECE_BYTES, end - position))
            if not piece:
                return
            # A sparse file may be larger than any disk: skip its holes instead of reading zeros.
            if is_hole(piece):
                self.num_malformed += 1
                self.offset, rest = min(end, skip_hole(file, position + len(piece))), b""
                continue
            lines, newline, rest = (rest + piece).rpartition(b"\n")
            self.offset += len(lines) + len(newline)
            if lines:
                yield lines
            # A line that never ends would fill the memory: count it as malformed and go on behind it.
            if len(rest) > MAX_RECORD_BYTES:
                self.num_malformed += 1
                self.offset, rest = self.offset + len(rest), b""


class SampledLines:
    """Reader of a growing JSON lines file: one piece per call, with skipping if it falls behind."""

    def __init__(self, path: Path, *, piece_bytes: int, max_behind_bytes: int, start: int = 0) -> None:
        """Create a reader from byte ``start`` on.

        If more than ``max_behind_bytes`` are unread, it skips to the last piece.
        """
        self._tail = LineTail(path)
        self._tail.offset = start
        self._piece_bytes = piece_bytes
        self._max_behind_bytes = max_behind_bytes
        self.num_skipped_bytes = 0
        self.is_behind = False
        """Whether the last call left data unread."""

    def read(self) -> list[dict[str, object]]:
        """Return new complete records, oldest first, from at most ``piece_bytes``."""
        # Keeping up with the run matters more than completeness: skip what was logged long ago.
        size = size_of(self._tail.path)
        if size - self._tail.offset > self._max_behind_bytes:
            self._skip_to(size - self._piece_bytes)
        before, end = self._tail.offset, self._tail.offset + self._piece_bytes
        records = self._tail.read(end)
        if size >= end and self._tail.offset == before:
            # One line longer than the piece cannot be a metric: skip it.
            self._skip_to(end)
        self.is_behind = size > self._tail.offset + self._piece_bytes
        return records

    def _skip_to(self, offset: int) -> None:
        """Skip to ``offset``. The rest of a line that is split there is malformed."""
        self.num_skipped_bytes += offset - self._tail.offset
        self._tail.offset = offset


def read_lines(path: Path) -> list[dict[str, object]]:
    """Return all complete records in the first :data:`MAX_LINES_BYTES` of ``path``."""
    return LineTail(path).read(MAX_LINES_BYTES)


def read_tail(path: Path, max_bytes: int) -> bytes:
    """Return the last ``max_bytes`` of a file; empty if it is missing or not a regular file."""
    try:
        with open_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - max_bytes))
            return file.read(min(size, max_bytes))
    except OSError:
        return b""


def read_tail_text(path: Path, max_bytes: int) -> str:
    """Return the same as text; invalid UTF-8 becomes the replacement character."""
    return read_tail(path, max_bytes).decode(errors="replace")


def _to_json_value(value: object, redact: Callable[[str], str]) -> object:
    """Return ``value`` as JSON can store it: text masked, non-finite floats as strings, others as text."""
    # JSON has no NaN and no infinity (RFC 8259, section 6), but a diverged loss is one.
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {redact(str(key)): _to_json_value(item, redact) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_json_value(item, redact) for item in value]
    if value is None or isinstance(value, int | float):
        return value
    return redact(str(value))
