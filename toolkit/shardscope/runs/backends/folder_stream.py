"""Copies of a run folder on machines that share no file system: what is new in a folder, as chunks of bytes.

The receiver's files are the only state. It reports their sizes and times, and the sender answers with the
chunks that are missing, at most ``MAX_BYTES`` at once. So memory is bounded, a slow receiver delays the
sender and nothing else, and after a lost connection both continue at the same byte: nothing is lost or
doubled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from shardscope.records.folder import EXPORT, MERGED, RECORDINGS, RunFolder
from shardscope.records.regular_files import open_descriptor, open_to_read, size_of
from shardscope.training.checkpoints.folders import CHECKPOINTS

CHUNK_BYTES = 2**20
MAX_BYTES = 2**22
"""Most bytes in one answer."""
MAX_FILE_BYTES = 2**26
"""Largest file of the user's own task that is copied; larger ones stay where they are, as checkpoints do."""
LAST = frozenset({"status.jsonl", "ended.json", "state.json"})
"""Files that say that something has ended. They follow everything that was written before them."""
RECORDS = frozenset({
    *RunFolder.SUBFOLDERS,
    *(RECORDINGS, "memory_snapshots", "nodes", "ray", "attempts"),
})  # fmt: skip
"""Subfolders whose files are copied however large they are."""
STAYING = frozenset({CHECKPOINTS, EXPORT, MERGED})
"""Subfolders of weights."""
PART = re.compile(r"[^/\0]+")


class State(NamedTuple):
    """Received part of one file of a run folder."""

    num_bytes: int
    """Number of its first bytes that are there."""
    time: int
    """``st_mtime_ns`` of the file that they come from; 0 for files that only grow."""
    size: int
    """Size of that file."""


class Chunk(NamedTuple):
    """Bytes of one file."""

    name: str
    """Path in the run folder, with slashes."""
    offset: int
    data: bytes
    size: int
    """Size of the whole file."""
    time: int
    """``st_mtime_ns`` of the file."""


def grows(name: str) -> bool:
    """Return whether a file is only appended to. All others are replaced."""
    if name.rpartition("/")[2] == "cards.jsonl":  # Thinned out from time to time (gpu_monitor.py).
        return False
    return name.endswith((".jsonl", ".log")) or ".tfevents." in name


def stays(name: str, size: int) -> bool:
    """Return whether a file is too large to be copied: weights, and large files of the user's own task."""
    top = name.partition("/")[0]
    if top in STAYING:
        return True
    return size > MAX_FILE_BYTES and top not in RECORDS and not grows(name) and name != "task.pkl"


def advance(states: dict[str, State], chunks: Iterable[Chunk]) -> None:
    """Update the states of a copy's files after it has received ``chunks``."""
    for chunk in chunks:
        end = chunk.offset + len(chunk.data)
        states[chunk.name] = State(end, 0, end) if grows(chunk.name) else State(end, chunk.time, chunk.size)


class FolderSource:
    """Reader of the bytes that another copy of a folder lacks; ``selects(name)`` chooses the files.

    ``limit(name, size)`` returns how many bytes may be read of a file that grows, at most ``size``.
    """

    def __init__(
        self,
        root: Path,
        selects: Callable[[str], bool],
        limit: Callable[[str, int], int] = lambda name, size: size,
    ) -> None:
        self._root, self._selects, self._limit = root, selects, limit

    def read(self, received: Mapping[str, State], max_bytes: int = MAX_BYTES) -> list[Chunk]:
        """Return the next chunks for a copy that has ``received``; none if it is complete."""
        # The files of LAST as they were before the others were listed: all that they announce is there then.
        before = {name: state for name, state in scan(self._root) if Path(name).name in LAST}
        now = {name: state for name, state in scan(self._root) if Path(name).name not in LAST}
        chunks: list[Chunk] = []
        left = max_bytes
        # Small files first: heartbeats do not wait for a long trace.
        ordered = sorted(now.items(), key=lambda item: item[1].size)
        for name, (_, changed, size) in (*ordered, *before.items()):
            if stays(name, size) or not self._selects(name):
                continue
            for chunk in self._read_file(name, size, changed, received.get(name)):
                if left <= 0:
                    return chunks
                chunks.append(chunk)
                left -= len(chunk.data)
        return chunks

    def _read_file(self, name: str, size: int, changed: int, state: State | None) -> Iterator[Chunk]:
        if grows(name):
            whole, size = size, self._limit(name, size)
            if state is None:
                offset = 0
            elif size <= state.num_bytes <= whole:
                return
            else:
                offset = state.num_bytes if state.num_bytes < size else 0
        elif state == (size, changed, size):
            return
        else:
            # A clock of files advances every few milliseconds: the next version may have the same time.
            offset = state.num_bytes if state is not None and state[1:] == (changed, size) else 0
        try:
            with open_to_read(self._root / name) as file:
                if not grows(name):
                    # It may have been replaced, and is replaced in the copy as a whole.
                    found = os.fstat(file.fileno())
                    offset = offset if (found.st_size, found.st_mtime_ns) == (size, changed) else 0
                    size, changed = found.st_size, found.st_mtime_ns
                while True:
                    data = os.pread(file.fileno(), min(CHUNK_BYTES, size - offset), offset)
                    if not data and offset < size:
                        return  # It has shrunk.
                    yield Chunk(name, offset, data, size, changed)
                    offset += len(data)
                    if offset >= size:
                        return
        except OSError:  # It is gone, or no regular file.
            return


class FolderCopy:
    """Writer of the chunks that another folder has sent; ``accepts(name)`` chooses the files."""

    def __init__(self, root: Path, accepts: Callable[[str], bool] = lambda name: True) -> None:
        self._root, self._accepts = root, accepts
        self._partial: dict[str, State] = {}
        """Files of which the first bytes have been received, beside the older ones that they will replace."""

    def list_received(self) -> dict[str, State]:
        """Return what is there, as :meth:`FolderSource.read` takes it."""
        states = {name: state for name, state in scan(self._root) if self._accepts(name)}
        return {**states, **self._partial}

    def write(self, chunks: Iterable[Chunk]) -> None:
        """Write chunks in their order; those that do not continue what is there are skipped.

        Raises ``OSError``, and ``ValueError`` for a name outside of the folder.
        """
        for chunk in chunks:
            parts = chunk.name.split("/")
            if not all(PART.fullmatch(part) and part not in (".", "..") for part in parts):
                raise ValueError(f"{chunk.name!r} is no file of a run folder")
            if not self._accepts(chunk.name):
                continue
            folder = self._root
            for part in parts[:-1]:
                folder /= part
                folder.mkdir(mode=0o700, exist_ok=True)
            if grows(chunk.name):
                _append(folder / parts[-1], chunk)
            else:
                self._replace(folder / parts[-1], chunk)

    def _replace(self, path: Path, chunk: Chunk) -> None:
        if _is_same(path, chunk):  # A heartbeat: only its time has changed. A full disk is no obstacle.
            os.utime(path, ns=(chunk.time, chunk.time))
            self._partial.pop(chunk.name, None)
            return
        partial = path.with_name(f".{path.name}.received")
        if chunk.offset == 0:
            partial.unlink(missing_ok=True)
        elif self._partial.get(chunk.name) != (chunk.offset, chunk.time, chunk.size):
            return
        descriptor = open_descriptor(partial, os.O_WRONLY | os.O_CREAT)
        try:
            _write_all(descriptor, chunk)
        finally:
            os.close(descriptor)
        end = chunk.offset + len(chunk.data)
        self._partial[chunk.name] = State(end, chunk.time, chunk.size)
        if end >= chunk.size:
            # The time of the original: readers see a heartbeat by it, and the sender that it is complete.
            os.utime(partial, ns=(chunk.time, chunk.time))
            partial.replace(path)
            del self._partial[chunk.name]


def _append(path: Path, chunk: Chunk) -> None:
    descriptor = open_descriptor(path, os.O_WRONLY | os.O_CREAT)
    try:
        size = os.fstat(descriptor).st_size
        if chunk.offset == 0 and size > 0:  # The original was replaced by a shorter file.
            os.ftruncate(descriptor, 0)
        elif chunk.offset != size:
            return
        try:
            _write_all(descriptor, chunk)
        except OSError:  # A full disk: the next chunk must continue what is there.
            os.ftruncate(descriptor, chunk.offset)
            raise
    finally:
        os.close(descriptor)


def _is_same(path: Path, chunk: Chunk) -> bool:
    """Return whether a chunk is a whole file, and the one at ``path`` has the same content."""
    if chunk.offset or len(chunk.data) != chunk.size or size_of(path) != chunk.size:
        return False
    try:
        with open_to_read(path) as file:
            return file.read(chunk.size + 1) == chunk.data
    except OSError:
        return False


def _write_all(descriptor: int, chunk: Chunk) -> None:
    rest, offset = memoryview(chunk.data), chunk.offset
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


def scan(root: Path) -> Iterator[tuple[str, State]]:
    """Yield each regular file in a run folder; neither temporary nor hidden ones."""
    pending = [""]
    while pending:
        inside = pending.pop()
        try:
            with os.scandir(root / inside) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.name.startswith(".") or entry.name == "tmp":
                        continue
                    name = f"{inside}/{entry.name}" if inside else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(name)
                    elif entry.is_file(follow_symlinks=False):
                        found = entry.stat(follow_symlinks=False)
                        changed = 0 if grows(name) else found.st_mtime_ns
                        yield name, State(found.st_size, changed, found.st_size)
        except OSError:  # A folder that was deleted meanwhile.
            continue
