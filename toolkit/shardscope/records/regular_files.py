"""Opening files of a run folder: regular files only, without following links and without blocking.

A run folder may come from an untrusted source. A named pipe in it would block its reader, a link to /dev/zero
would fill the memory, and a link to a file of the user would redirect the run's writes to it. So all files of
a run folder are opened here.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

# Windows has none of these flags, and no named pipes in folders. Runs are read there, but not launched.
_NEVER_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_BINARY = getattr(os, "O_BINARY", 0)
READ_FLAGS = os.O_RDONLY | _NEVER_WAIT | _BINARY
"""Flags to open a file for reading that may be anything: links are not followed, pipes not waited for."""
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

    It is an ``OSError`` for file handling, and the ``ValueError`` that users get for a damaged run folder.
    """


def open_descriptor(path: Path, flags: int) -> int:
    """Open the regular file at ``path`` and return its descriptor; new files have mode 0600.

    Raises :class:`NotRegularFileError` for anything else at the path, else ``OSError`` like ``os.open``.
    """
    try:
        descriptor = os.open(path, flags | _NEVER_WAIT | _BINARY, 0o600)
    except OSError as error:
        # ELOOP: a link (O_NOFOLLOW); ENXIO: a socket, or writing to a pipe without reader; EISDIR: a folder.
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
            check_regular(path)
        raise
    # Check the open descriptor, not the path: the path could be replaced between check and open.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        check_regular(path)
        raise _create_error(path, "not a regular file")  # the file was replaced after the open
    return descriptor


def open_to_read(path: Path) -> BinaryIO:
    """Open ``path`` for reading. Raises as :func:`open_descriptor`."""
    return os.fdopen(open_descriptor(path, READ_FLAGS), "rb")


def open_to_change(path: Path) -> BinaryIO:
    """Open the existing ``path`` for reading and overwriting. Raises as :func:`open_descriptor`."""
    return os.fdopen(open_descriptor(path, os.O_RDWR), "r+b")


def open_to_append(path: Path) -> BinaryIO:
    """Open ``path`` for appending, and create it if it is missing. Raises as :func:`open_descriptor`."""
    return os.fdopen(open_descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def open_new(path: Path) -> BinaryIO:
    """Create ``path`` for writing, after removing a leftover of a killed process or a planted file.

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
            raise _create_error(path, "behind a link in a circle") from error
        raise
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "not a regular file")
        raise _create_error(path, kind)
    return status


def size_of(path: Path) -> int:
    """Return the size of ``path`` in bytes; 0 if it is missing, inaccessible or not a regular file."""
    try:
        status = check_regular(path)
    except OSError:
        return 0
    return 0 if status is None else status.st_size


def is_hole(piece: bytes) -> bool:
    """Return whether ``piece`` of a text file has only zero bytes, as the hole of a sparse file reads."""
    return piece[:1] == b"\0" and piece.count(0) == len(piece)


def skip_hole(file: BinaryIO, offset: int) -> int:
    """Return the next offset, from ``offset`` on, with stored data; the file's size if there is none.

    A sparse file may be larger than any disk, so reading its zeros could take hours.
    """
    if not hasattr(os, "SEEK_DATA"):
        return offset
    try:
        return os.lseek(file.fileno(), offset, os.SEEK_DATA)
    except OSError as error:
        # ENXIO: no data up to the end (lseek(2)). Other errors: a file system without SEEK_DATA.
        return os.fstat(file.fileno()).st_size if error.errno == errno.ENXIO else offset


def _create_error(path: Path, kind: str) -> NotRegularFileError:
    return NotRegularFileError(f"{path} is damaged: it is {kind}; allowed: a regular file.")
