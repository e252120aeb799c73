"""A file that the processes of one run share and that no other user can open: memory without a name."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def open_private_file(folder: Path) -> tuple[int, str]:
    """Return the descriptor of a new, empty file, and the path at which processes that inherit it open it.

    It is anonymous memory (memfd_create(2)): it has no name in any folder, its locks are local whatever file
    system the run folder is on, and it is gone with the last process that holds it, however that ended. Of
    ``/proc/<pid>/fd`` proc(5) says that only this user can read it. Where there is no such memory (macOS,
    a kernel that forbids it) it is a file of mode 0600 in ``folder``. Raises ``OSError``.
    """
    with contextlib.suppress(AttributeError, OSError):
        descriptor = os.memfd_create("shardscope")
        path = f"/proc/self/fd/{descriptor}"
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError:  # No /proc, say.
            os.close(descriptor)
            raise
        return descriptor, path
    return tempfile.mkstemp(prefix="store-", dir=folder)
