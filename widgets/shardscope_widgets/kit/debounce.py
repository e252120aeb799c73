"""Debouncing: work that is delayed until the user pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Debounced:
    """A debounced call of ``work``, ``seconds`` after the last request; immediate without an event loop.

    A kernel handles messages one at a time: work done for every input event delays the next event.
    """

    def __init__(self, work: Callable[[], None], seconds: float) -> None:
        self._work = work
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def request(self) -> None:
        """Schedule the work, replacing a pending request."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a script, or another thread
            self._work()
            return
        self._timer = loop.call_later(self._seconds, self._work)
