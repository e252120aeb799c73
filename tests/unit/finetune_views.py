"""Waiting for the form of a Fine-tune view, which a thread fills in when it has read the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fake_runs import wait_until

READ_SECONDS = 180.0
"""The first read imports datasets and transformers."""


def wait_until_read(
    view: Any, holds: Callable[[], Any] = lambda: True, seconds: float = READ_SECONDS
) -> None:
    """Wait until the data are read, all that follows from them is shown, and ``holds`` is true."""
    # The worker is idle once the observers of its answer are done.
    reader = view.form.data_panel._reader
    assert wait_until(lambda: not reader.is_busy and holds(), seconds), (view.headline.value, view.plan)
