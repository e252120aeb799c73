"""Meaning of an ``OSError``: the file is absent, a resource is used up, or neither."""

from __future__ import annotations

import errno

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors for no space, no quota and the maximum file size (RLIMIT_FSIZE; Python ignores SIGXFSZ)."""
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


def describe_shortage(error: OSError) -> str | None:
    """Return the resource that is used up and how to get more of it; None if the error is another one."""
    return _SHORTAGES.get(error.errno or 0)


def describe_os_error(error: OSError) -> str:
    """Return the cause of ``error`` as a clause."""
    return describe_shortage(error) or error.strerror or str(error)
