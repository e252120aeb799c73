"""Anonymous shared file (memfd) for the processes of one run, inaccessible to other users."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def open_private_file(folder: Path) -> tuple[int, str]:
    """Return the descriptor of a new, empty file, and the path at which processes that inherit it open it.

    It is anonymous memory (memfd_create(2)): it has no name in any folder, its locks do not depend on the run
    folder's file system, and the kernel frees it with the last process that has it open. Only the same user
    can read ``/proc/<pid>/fd`` (proc(5)). Without memfd (macOS, kernels that forbid it) it is a file of mode
    0600 in ``folder``. Raises ``OSError``.
    """
    with contextlib.suppress(AttributeError, OSError):
        descriptor = os.memfd_create("shardscope")
        path = f"/proc/self/fd/{descriptor}"
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError:  # for example without /proc
            os.close(descriptor)
            raise
        return descriptor, path
    return tempfile.mkstemp(prefix="store-", dir=folder)
