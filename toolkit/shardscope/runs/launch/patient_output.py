"""Best-effort output of a rank: dropped where the disk of its log is full, and given back after the task.

A full disk is no reason to fail, and neither is a task that closed ``sys.stdout`` or replaced it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import sys
from typing import Any

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space, no quota, or the largest size that a file may have (RLIMIT_FSIZE; Python ignores SIGXFSZ)."""


class _Patient(io.FileIO):
    """A file that takes all there is room for and drops the rest."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return memoryview(data).nbytes


def print_patiently(stdout: int = 1, stderr: int = 2) -> None:
    """Give ``sys.stdout`` and ``sys.stderr``, line by line, to these descriptors.

    A surrogate in a path or a text of the user must not end a training run either.
    """
    for name, descriptor in (("stdout", stdout), ("stderr", stderr)):
        raw = io.BufferedWriter(_Patient(descriptor, "wb", closefd=False))
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)


def flush_output() -> None:
    """Flush ``sys.stdout`` and ``sys.stderr``, whatever they are by now: None, closed, without ``flush``."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def restore_output(log: int) -> None:
    """Flush what a task left in ``sys.stdout`` and ``sys.stderr``, and give both to the descriptor ``log``.

    The interpreter flushes them at its exit, and turns the exit code into 120 where it cannot
    (https://docs.python.org/3/library/sys.html#sys.exit). The objects that a task put there stay alive, so
    that none of them closes a descriptor when it is collected.
    """
    flush_output()
    _REPLACED.extend((sys.stdout, sys.stderr))
    print_patiently(log, log)


_REPLACED: list[Any] = []
