"""Predictions by the catalogue alone, whatever machine they are made on, and for older versions of torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from tests.accuracy.own_rows import SOURCE
from tests.accuracy.rows import Row, read_source

from shardscope.catalog import load_efficiency
from shardscope.timing import rates
from shardscope.timing.calibration.files import FOLDER_VARIABLE


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


RECENT = (SOURCE, "NeMo Automodel performance summary")
"""Sources with torch 2.11 or later: our own runs, and NVIDIA's containers 26.02 and 26.04."""
_REENTRANT = {"full": {"forward": 1.0, "repeated": 1.0, "backward": 1.0}}


@contextmanager
def use_torch_of(row: Row) -> Iterator[None]:
    """Predict for the versions of torch and transformers of the row.

    Before torch 2.11, ``scaled_dot_product_attention`` ran FlashAttention's kernels on all GPUs. Before
    transformers 5, checkpoints of whole layers were reentrant: without a call of Python for each tensor.
    """
    if read_source(row) in RECENT:
        yield
        return
    rates.look_up_rates.cache_clear()
    with (
        mock.patch.object(rates, "prefers_cudnn_attention", lambda gpu: False),
        mock.patch.dict(load_efficiency()["checkpoint"], _REENTRANT),
    ):
        try:
            yield
        finally:
            rates.look_up_rates.cache_clear()
