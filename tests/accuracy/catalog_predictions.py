"""Predictions by the catalogue alone, whatever machine they are made on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from shardscope.timing.calibration.store import FOLDER_VARIABLE


@contextmanager
def uncalibrated() -> Iterator[None]:
    """Keeps out what was calibrated on this machine, which others' runs know nothing of."""
    before = os.environ.get(FOLDER_VARIABLE)
    with tempfile.TemporaryDirectory() as empty:
        os.environ[FOLDER_VARIABLE] = empty
        try:
            yield
        finally:
            os.environ.pop(FOLDER_VARIABLE)
            if before is not None:
                os.environ[FOLDER_VARIABLE] = before
