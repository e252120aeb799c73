"""Files of a trace, and reading them with size limits; regular files only."""

from __future__ import annotations

import os
import stat
import zlib
from pathlib import Path
from typing import BinaryIO, NoReturn

from shardscope.machine.user_folders import expand_home
from shardscope.records.folder import RunFolder
from shardscope.records.regular_files import READ_FLAGS

MAX_JSON_BYTES = 2 * 1024**3
"""Largest JSON after decompression. It is never in memory as a whole."""

MAX_RATIO = 400
"""Largest accepted gzip ratio. Kineto's JSON has 8 to 30, a decompression bomb 1,000."""

_RATIO_FROM_BYTES = 16 * 1024**2
_PIECE_BYTES = 8 * 1024**2
_PACKED_BYTES = 64 * 1024
"""Compressed bytes read at a time. The ratio is known after each: a bomb unpacks to 26 MiB, not to 400."""
_GZIP_WBITS = 31  # zlib: a gzip header, and its checksum at the end
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
    path = expand_home(source)
    if not path.is_dir():
        return [path]
    # A run's folder is accepted in place of its "traces".
    if (path / "traces").is_dir():
        path = _find_newest_recording(RunFolder(path))
    files = sorted(entry for entry in path.iterdir() if entry.name.endswith(_SUFFIXES))
    if not files:
        fix = "give the folder that holds rank-0.json.gz"
        if inside := sorted({one.parent for suffix in _SUFFIXES for one in path.glob(f"*/*{suffix}")}):
            fix = f"give {inside[0]}, which has some"
        if len(inside) > 1:
            fix = f"give one of its {len(inside):,} subfolders with some, such as {inside[0]}"
        refuse_file(path, "is a folder without *.json or *.json.gz", fix)
    return files


def _find_newest_recording(folder: RunFolder) -> Path:
    return folder.recording(max(folder.list_recordings(), default=0))


def open_trace_file(path: Path) -> BinaryIO:
    """Open a trace file. Raises ``ValueError`` for anything but a regular file that is not empty."""
    # O_NOFOLLOW below would fail with a message about too many links; this one names the target.
    if path.is_symlink():
        refuse_file(path, "is a symbolic link", f"load the file that it points to, {_resolve_link(path)}")
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer that may never come.
        handle = os.open(path, READ_FLAGS)
    except FileNotFoundError:
        refuse_file(path, "does not exist", f"check the path; the current folder is {Path.cwd()}")
    except OSError as error:
        refuse_file(path, f"cannot be opened ({error.strerror})", "check its permissions")
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
        os.close(handle)
        if stat.S_ISREG(status.st_mode):
            refuse_file(path, "is empty", "record it again; the rank was probably killed while writing")
        refuse_file(path, "is a folder, pipe or device", "give a regular .json or .json.gz file")
    return os.fdopen(handle, "rb")


def read_bytes(path: Path) -> bytes:
    """Return the whole content of a file, decompressed if gzipped. Raises ``ValueError``."""
    stream = TextStream(path)
    try:
        pieces = list(iter(lambda: stream.read(_PIECE_BYTES), b""))
    finally:
        stream.close()
    if stream.damage:
        refuse_file(path, stream.damage, "copy or record it again; the rank was killed or the disk full")
    return b"".join(pieces)


class TextStream:
    """The text of a trace file, decompressed piece by piece within the size limits.

    A gzip file that is truncated or damaged ends at its last readable byte; ``damage`` says so.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ``ValueError``, also for a plain file above the size limit."""
        self.path = path
        self.damage = ""
        """Problem of the file ("is a truncated gzip file"); empty if there is none."""
        self.num_file_bytes = 0
        """Bytes read of the file, compressed ones if it is."""
        self._file = open_trace_file(path)
        self._file_bytes = os.fstat(self._file.fileno()).st_size
        self._text_bytes = 0
        # Check for gzip by its magic bytes, not by the file name.
        is_packed = self._file.read(2) == b"\x1f\x8b"
        self._file.seek(0)
        self._unpacker = zlib.decompressobj(wbits=_GZIP_WBITS) if is_packed else None
        self._packed = b""
        if not is_packed and self._file_bytes > MAX_JSON_BYTES:
            self.close()
            _refuse_size(path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, num_bytes: int) -> bytes:
        """Return the next ``num_bytes``, fewer at the end. Raises ``ValueError`` above the size limits."""
        if self._unpacker is None:
            piece = self._file.read(num_bytes)
            self.num_file_bytes += len(piece)
            return piece
        pieces: list[bytes] = []
        missing = num_bytes
        while missing and not self.damage:
            piece = self._decompress(missing)
            if not piece:
                break
            pieces.append(piece)
            missing -= len(piece)
            self._text_bytes += len(piece)
            self._check_size()
        return b"".join(pieces)

    def _decompress(self, num_bytes: int) -> bytes:
        """Return up to ``num_bytes`` of text; nothing at the end of the file or at damage."""
        assert self._unpacker is not None
        while True:
            if self._unpacker.eof:
                # A file may have several gzip members; zeros after the last one are padding.
                self._packed = self._unpacker.unused_data or self._read_packed()
                if not self._packed.strip(b"\0"):
                    return b""
                self._unpacker = zlib.decompressobj(wbits=_GZIP_WBITS)
            packed = self._packed or self._read_packed()
            try:
                piece = self._unpacker.decompress(packed, num_bytes)
            except zlib.error as error:
                self.damage = f"is a damaged gzip file ({error})"
                return b""
            self._packed = self._unpacker.unconsumed_tail
            if piece:
                return piece
            if not packed and not self._unpacker.eof:
                self.damage = "is a truncated gzip file"
                return b""

    def _read_packed(self) -> bytes:
        packed = self._file.read(_PACKED_BYTES)
        self.num_file_bytes += len(packed)
        return packed

    def _check_size(self) -> None:
        if self._text_bytes > MAX_JSON_BYTES:
            _refuse_size(self.path)
        # Compared with the bytes unpacked so far: the file's size would allow a bomb that real data follows.
        if self._text_bytes > _RATIO_FROM_BYTES and self._text_bytes > MAX_RATIO * self.num_file_bytes:
            refuse_file(
                self.path,
                f"unpacks to more than {MAX_RATIO} times its size, which no profiler writes",
                "do not trust this file; record the trace again",
            )


def _resolve_link(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # circular link
        return path.readlink()


def _refuse_size(path: Path) -> NoReturn:
    limit = MAX_JSON_BYTES / 1024**3
    refuse_file(
        path, f"holds more than {limit:.3g} GiB of JSON", "record fewer steps, or without stacks and shapes"
    )
