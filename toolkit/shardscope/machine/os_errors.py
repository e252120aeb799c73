"""Meaning of an ``OSError``: the file is absent, a resource is used up, or neither."""

from __future__ import annotations

import errno

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors for no space, no quota and the maximum file size (RLIMIT_FSIZE; Python ignores SIGXFSZ)."""
UNWRITABLE_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
"""Errors of a disk that may be cured, such as a server that is away or credentials that have expired."""
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
_SHORTAGES = {
    errno.EMFILE: "this process has no free file descriptor (close files, or raise ulimit -n)",
    errno.ENFILE: "this machine has no free file descriptor (close files of other processes)",
    errno.ENOMEM: "this machine has no free memory, or this process may not use more (ulimit -v)",
    errno.EAGAIN: "no other process or thread may be started (ulimit -u, or the container's limit)",
}


def is_absent(error: OSError) -> bool:
    """Return whether the path does not exist. After other errors its existence is unknown."""
    return error.errno in _ABSENT


def is_disk_error(error: OSError) -> bool:
    """Return whether the disk does not take a write now, and may take it later."""
    return error.errno in (*DISK_FULL_ERRORS, *UNWRITABLE_ERRORS)


def find_disk_fix(error: OSError) -> str:
    """Return what cures an error of :func:`is_disk_error`."""
    is_full = error.errno in DISK_FULL_ERRORS
    return "free some space on that disk" if is_full else "make the run folder writable again"


def describe_shortage(error: OSError) -> str | None:
    """Return the resource that is used up and how to get more of it; None if the error is another one."""
    return _SHORTAGES.get(error.errno or 0)


def describe_os_error(error: OSError) -> str:
    """Return the cause of ``error`` as a clause."""
    return describe_shortage(error) or error.strerror or str(error)
