"""What a rank prints where the disk of its log is full: lost, as its metrics are, and no reason to fail."""

from __future__ import annotations

import errno
import io
import sys
from typing import Any

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class _Patient(io.FileIO):
    """A file that takes all there is room for and drops the rest."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return memoryview(data).nbytes


def print_patiently() -> None:
    """Give ``sys.stdout`` and ``sys.stderr``, line by line, to descriptors 1 and 2.

    A surrogate in a path or a text of the user must not end a training run either.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(_Patient(descriptor, "wb", closefd=False))
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
