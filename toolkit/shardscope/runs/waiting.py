"""Waiting for the end of runs by polling, in a thread or in an event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from shardscope.core.errors import check_number

POLL_SECONDS = 0.05
LONG_POLL_SECONDS = 0.2
"""Polling interval after ``PATIENT_AFTER_SECONDS`` of waiting: longer, to leave the core to CPU ranks."""
PATIENT_AFTER_SECONDS = 3.0
MAX_TIMEOUT_SECONDS = 1e9
"""Upper bound of a timeout, about thirty years."""


def wait_for(has_ended: Callable[[], bool], timeout: float | None) -> None:
    """Block until ``has_ended()``, at most ``timeout`` seconds (None: no limit). Raises ``ValueError``."""
    for seconds in _poll_intervals(timeout):
        if has_ended():
            break
        time.sleep(seconds)


async def wait_for_async(has_ended: Callable[[], bool], timeout: float | None) -> None:
    """Wait like :func:`wait_for`, without blocking the event loop."""
    import asyncio  # Imported lazily: the supervisor imports this module and starts faster without it.

    for seconds in _poll_intervals(timeout):
        if has_ended():
            break
        await asyncio.sleep(seconds)


def _poll_intervals(timeout: float | None) -> Iterator[float]:
    """Yield the seconds to sleep between two checks, until ``timeout`` seconds are over."""
    if timeout is not None:
        check_number("run.wait timeout", timeout, low=0, high=MAX_TIMEOUT_SECONDS)
    start = time.monotonic()
    while timeout is None or time.monotonic() - start < timeout:
        yield POLL_SECONDS if time.monotonic() - start < PATIENT_AFTER_SECONDS else LONG_POLL_SECONDS
