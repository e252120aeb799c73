"""A wall clock that a test sets, for every process of a run: as ``sitecustomize``, before anything else."""

from __future__ import annotations

import os
import time
from pathlib import Path

OFFSET = "SHARDSCOPE_TEST_CLOCK"
"""Environment variable: a file with the seconds by which the clock was set."""


def install() -> None:
    """``time.time()`` of this process is the machine's plus what the file says at that moment."""
    real, file = time.time, Path(os.environ[OFFSET])

    def jumping() -> float:
        try:
            return real() + float(file.read_text() or 0)
        except OSError:
            return real()

    time.time = jumping


def set_clock(seconds: float) -> None:
    """From now on, for all of them."""
    file = Path(os.environ[OFFSET])
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    partial.write_text(str(seconds))
    partial.replace(file)
