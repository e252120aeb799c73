"""Best-effort rank log: dropped when the disk is full, and restored after the task.

Neither a full disk nor a task that closes or replaces ``sys.stdout`` fails the run.
"""

from __future__ import annotations

import contextlib
import io
import sys
from typing import TYPE_CHECKING, TextIO

from shardscope.machine.os_errors import DISK_FULL_ERRORS

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _BestEffortFile(io.FileIO):
    """A file that drops data when there is no space left."""

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRORS:
                raise
            return memoryview(data).nbytes


def redirect_streams(stdout: int = 1, stderr: int = 2) -> None:
    """Redirect ``sys.stdout`` and ``sys.stderr``, line-buffered, to these descriptors.

    Unencodable characters (surrogates in a path) are escaped: they must not end a training run either.
    """
    for name, descriptor in (("stdout", stdout), ("stderr", stderr)):
        raw = io.BufferedWriter(_BestEffortFile(descriptor, "wb", closefd=False))
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)


def flush_output() -> None:
    """Flush ``sys.stdout`` and ``sys.stderr``, which may be None, closed or without ``flush``."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def restore_output(log: int) -> None:
    """Flush the task's ``sys.stdout`` and ``sys.stderr``, and redirect both to the descriptor ``log``.

    At exit the interpreter flushes them and changes the exit code to 120 if that fails
    (https://docs.python.org/3/library/sys.html#sys.exit). References to the task's own stream objects are
    kept, so that none closes a descriptor when it is garbage-collected.
    """
    flush_output()
    _REPLACED.extend((sys.stdout, sys.stderr))
    redirect_streams(log, log)


_REPLACED: list[TextIO | None] = []
"""The replaced stream objects, kept alive."""
