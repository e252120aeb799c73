"""Files of a trace, and reading them with size limits; regular files only."""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from pathlib import Path
from typing import BinaryIO, NoReturn

from shardscope.records.folder import RunFolder

MAX_JSON_BYTES = 2 * 1024**3
"""Largest JSON after decompression; decoding needs several times as much memory."""

MAX_RATIO = 400
"""Largest accepted gzip ratio. Kineto's JSON has 8 to 30, a decompression bomb 1,000."""

_RATIO_FROM_BYTES = 32 * 1024**2
_CHUNK_BYTES = 8 * 1024**2
_SUFFIXES = (".json", ".json.gz")


def refuse_file(path: Path, what: str, fix: str) -> NoReturn:
    """Raise ``ValueError`` with the file, the problem and the fix."""
    raise ValueError(f"Trace file {path} {what}. Fix: {fix}.")


def list_trace_files(source: object) -> list[Path]:
    """Return the files of a path or run: one file, or all ``*.json`` and ``*.json.gz`` of a folder.

    Raises ``ValueError`` when ``source`` is neither, does not exist or holds no trace.
    """
    # A Run is recognized by its attribute: trace is a layer below runs and cannot import the class.
    folder = getattr(source, "folder", None)
    if folder is not None:
        source = _find_newest_recording(RunFolder(folder))
        if not source.exists():
            refuse_file(source, "does not exist: this run recorded no trace", "launch it with profile=True")
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            f"Trace.load got {type(source).__name__}; allowed: a trace file, a folder of ranks, or a Run. "
            "Fix: pass run.folder / 'traces'."
        )
    path = Path(source)
    if not path.is_dir():
        return [path]
    # A run's folder is accepted in place of its "traces".
    if (path / "traces").is_dir():
        path = _find_newest_recording(RunFolder(path))
    files = sorted(entry for entry in path.iterdir() if entry.name.endswith(_SUFFIXES))
    if not files:
        refuse_file(
            path, "is a folder without *.json or *.json.gz", "give the folder that holds rank-0.json.gz"
        )
    return files


def _find_newest_recording(folder: RunFolder) -> Path:
    return folder.recording(max(folder.list_recordings(), default=0))


def read_bytes(path: Path) -> bytes:
    """Return the content of a trace file, decompressed if gzipped.

    Raises ``ValueError`` for anything but a regular file within the size limits.
    """
    # O_NOFOLLOW below would fail with a message about too many links; this one names the target.
    if path.is_symlink():
        refuse_file(path, "is a symbolic link", f"load the file that it points to, {_resolve_link(path)}")
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer that may never come.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        refuse_file(path, "does not exist", f"check the path; the current folder is {Path.cwd()}")
    except OSError as error:
        refuse_file(path, f"cannot be opened ({error.strerror})", "check its permissions")
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        refuse_file(path, "is a folder, pipe or device", "give a regular .json or .json.gz file")
    # Check for gzip by its magic bytes, not by the file name.
    with os.fdopen(handle, "rb") as file:
        if status.st_size == 0:
            refuse_file(path, "is empty", "record it again; the rank was probably killed while writing")
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if packed:
            return _decompress(path, file, status.st_size)
        if status.st_size > MAX_JSON_BYTES:
            _refuse_size(path)
        return file.read()


def _resolve_link(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # circular link
        return path.readlink()


def _decompress(path: Path, file: BinaryIO, packed_bytes: int) -> bytes:
    # In chunks, so that a decompression bomb is noticed long before it fills the memory.
    chunks: list[bytes] = []
    total = 0
    try:
        with gzip.GzipFile(fileobj=file) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                chunks.append(chunk)
                total += len(chunk)
                if total > MAX_JSON_BYTES:
                    _refuse_size(path)
                if total > _RATIO_FROM_BYTES and total > MAX_RATIO * packed_bytes:
                    refuse_file(
                        path,
                        f"unpacks to more than {MAX_RATIO} times its size, which no profiler writes",
                        "do not trust this file; record the trace again",
                    )
    except EOFError:
        refuse_file(path, "is a truncated gzip file", "record it again; the rank was killed or the disk full")
    except (gzip.BadGzipFile, zlib.error) as error:
        refuse_file(path, f"is a damaged gzip file ({error})", "copy or record it again")
    return b"".join(chunks)


def _refuse_size(path: Path) -> NoReturn:
    limit = MAX_JSON_BYTES / 1024**3
    refuse_file(
        path, f"holds more than {limit:.3g} GiB of JSON", "record fewer steps, or without stacks and shapes"
    )
