"""Opening the files of a run folder: regular files only, never through a link, and without waiting.

A run folder may be a copy that somebody else made. A named pipe in it would hang its reader, a link to
/dev/zero fill the memory, and a link to a file of the user's take what is meant for the run. So every file of
a run folder is opened here.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

# Windows, where runs are read and none is launched, has neither; nor has it named pipes in folders.
_NEVER_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotRegularFileError(OSError, ValueError):
    """A file of a run folder is a link, a folder, a pipe, a socket or a device.

    An ``OSError`` where files are handled, and the ``ValueError`` that users get of a damaged run folder.
    """


def open_descriptor(path: Path, flags: int) -> int:
    """Return a descriptor of the regular file at ``path``; new files are 0600.

    Raises :class:`NotRegularFileError` for anything else that is there, else ``OSError`` as ``os.open``.
    """
    try:
        descriptor = os.open(path, flags | _NEVER_WAIT | _BINARY, 0o600)
    except OSError as error:
        # ELOOP: a link (O_NOFOLLOW); ENXIO: a socket, or a pipe to write that nobody reads; EISDIR: a folder.
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
            check_regular(path)
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        check_regular(path)
        raise _refusal(path, "no regular file")  # It was replaced since.
    return descriptor


def open_to_read(path: Path) -> BinaryIO:
    """Open ``path`` for reading. Raises as :func:`open_descriptor`."""
    return os.fdopen(open_descriptor(path, os.O_RDONLY), "rb")


def open_to_change(path: Path) -> BinaryIO:
    """Open ``path``, which exists, for reading and overwriting. Raises as :func:`open_descriptor`."""
    return os.fdopen(open_descriptor(path, os.O_RDWR), "r+b")


def open_to_append(path: Path) -> BinaryIO:
    """Open ``path`` for appending, and create it if it is missing. Raises as :func:`open_descriptor`."""
    return os.fdopen(open_descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def open_new(path: Path) -> BinaryIO:
    """Create ``path`` for writing; what a killed process left there, or somebody planted, is removed first.

    Raises ``OSError``.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        descriptor = open_descriptor(path, flags)
    except FileExistsError:
        path.unlink()
        descriptor = open_descriptor(path, flags)
    return os.fdopen(descriptor, "wb")


def check_regular(path: Path) -> os.stat_result | None:
    """Return the status of ``path`` itself, links not followed; None if nothing is there.

    Raises :class:`NotRegularFileError` for anything but a regular file, else ``OSError``.
    """
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refusal(path, "behind a link in a circle") from error
        raise
    if not stat.S_ISREG(status.st_mode):
        kind = next((words for is_kind, words in _KINDS if is_kind(status.st_mode)), "no regular file")
        raise _refusal(path, kind)
    return status


def size_of(path: Path) -> int:
    """Return the bytes of ``path``; 0 if it is missing, cannot be seen or is no regular file."""
    try:
        status = check_regular(path)
    except OSError:
        return 0
    return 0 if status is None else status.st_size


def is_hole(piece: bytes) -> bool:
    """Whether ``piece`` of a text file is zeros only: nobody writes these, and a hole reads as them."""
    return piece[:1] == b"\0" and piece.count(0) == len(piece)


def skip_hole(file: BinaryIO, offset: int) -> int:
    """Return the next offset, from ``offset`` on, at which bytes are stored; else the size of the file.

    A sparse file may be larger than any disk, so reading its zeros would take hours.
    """
    if not hasattr(os, "SEEK_DATA"):
        return offset
    try:
        return os.lseek(file.fileno(), offset, os.SEEK_DATA)
    except OSError as error:
        # ENXIO: nothing up to the end (lseek(2)). Others: a file system that cannot tell.
        return os.fstat(file.fileno()).st_size if error.errno == errno.ENXIO else offset


def _refusal(path: Path, kind: str) -> NotRegularFileError:
    return NotRegularFileError(f"{path} is damaged: it is {kind}, and a run has a regular file there.")
