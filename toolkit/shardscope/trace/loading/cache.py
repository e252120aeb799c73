"""Cache of a trace file's columns: a file next to it, memory-mapped when the trace is opened again.

A cache is trusted as little as the trace itself: it holds no pickle and is checked when it is read. Its name
contains the size and modification time of the trace file. A stale or damaged cache, or one of another
version, is ignored and written again.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from shardscope.records.regular_files import READ_FLAGS
from shardscope.trace.loading.column_format import ColumnError, map_file, pack_rank, unpack_rank
from shardscope.trace.loading.rank_columns import RankColumns

MIN_FILE_BYTES = 2 * 1024**2
"""Smallest trace file with a cache; smaller ones load in a fraction of a second without."""
FOLDER = ".shardscope-cache"


def find_cache_path(path: Path) -> Path | None:
    """Return the path of the cache of a trace file; None if the file is too small for one.

    The name has the size and time of the trace file: a changed file has another cache.
    """
    try:
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size < MIN_FILE_BYTES:
        return None
    return path.parent / FOLDER / f"{path.name}-{status.st_size}-{status.st_mtime_ns}.columns"


def read_cache(path: Path) -> RankColumns | None:
    """Return the rank of a trace file from its cache; None without a readable one."""
    cache = find_cache_path(path)
    if cache is None:
        return None
    return read_rank_file(cache, path)


def read_rank_file(file: Path, path: Path) -> RankColumns | None:
    """Return the columns in ``file`` of the trace file ``path``, mapped into memory; None if unreadable."""
    try:
        # Do not follow a link, nor wait for a pipe or device, in the place of the file.
        handle = os.open(file, READ_FLAGS)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        rank = unpack_rank(map_file(handle), path)
        rank.release()
        return rank
    except (ColumnError, OSError, ValueError):
        return None
    finally:
        os.close(handle)


def write_cache(path: Path, rank: RankColumns) -> Path | None:
    """Write the cache of a trace file, and remove those of its earlier contents.

    Return its path; None if the folder cannot be written, which is no error, or the file is too small.
    """
    cache = find_cache_path(path)
    if cache is None or cache.parent.is_symlink():
        return None
    try:
        # A folder without write permission stays as it is, also where root could write into it.
        if not path.parent.stat().st_mode & stat.S_IWUSR:
            return None
        cache.parent.mkdir(mode=0o700, exist_ok=True)
        write_rank_file(cache, rank)
        for other in cache.parent.glob("*.columns"):
            if other != cache and other.name.rsplit("-", 2)[0] == path.name:
                other.unlink(missing_ok=True)
    except OSError:
        return None
    return cache


def map_rank(rank: RankColumns) -> RankColumns:
    """Return the rank with its columns in a temporary file without a name, mapped into memory.

    The system can then reclaim its memory. The rank is returned unchanged if no file can be written.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="shardscope-trace-") as folder:
            file = Path(folder) / "columns"
            write_rank_file(file, rank)
            return read_rank_file(file, rank.path) or rank
    except OSError:
        return rank


def write_rank_file(file: Path, rank: RankColumns) -> None:
    """Write the columns of a rank. The file appears at once and whole. Raises ``OSError``."""
    handle, temporary = tempfile.mkstemp(prefix=".new-", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as output:
            for piece in pack_rank(rank):
                output.write(piece)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
