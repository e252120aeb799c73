"""A wall clock that a test sets, for every process of a run: as ``sitecustomize``, before anything else."""

from __future__ import annotations

import os
import time
from pathlib import Path

OFFSET = "SHARDSCOPE_TEST_CLOCK"
"""Environment variable: a file with the seconds by which the clock was set."""


def install_clock() -> None:
    """Make ``time.time()`` of this process the machine's time plus the number in the file."""
    real, file = time.time, Path(os.environ[OFFSET])

    def read_jumping_clock() -> float:
        try:
            return real() + float(file.read_text() or 0)
        except OSError:
            return real()

    time.time = read_jumping_clock


def set_clock(seconds: float) -> None:
    """From now on, for all of them."""
    file = Path(os.environ[OFFSET])
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    partial.write_text(str(seconds))
    partial.replace(file)
