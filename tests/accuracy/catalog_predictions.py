"""Predictions by the catalogue alone, whatever machine they are made on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from shardscope.timing.calibration.store import FOLDER_VARIABLE


@contextmanager
def ignore_calibrations() -> Iterator[None]:
    """Ignore the calibrations of this machine, which do not hold for the rows' machines."""
    before = os.environ.get(FOLDER_VARIABLE)
    with tempfile.TemporaryDirectory() as empty:
        os.environ[FOLDER_VARIABLE] = empty
        try:
            yield
        finally:
            os.environ.pop(FOLDER_VARIABLE)
            if before is not None:
                os.environ[FOLDER_VARIABLE] = before
