"""Work that waits until a person pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Later:
    """Calls ``work`` once, ``seconds`` after it was last asked for; at once where no event loop runs.

    A kernel answers messages one by one: what is done for every move of an input delays the next.
    """

    def __init__(self, work: Callable[[], None], seconds: float) -> None:
        self._work = work
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def ask(self) -> None:
        """Ask for the work; an earlier request that still waits is forgotten."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a script, or a thread of its own
            self._work()
            return
        self._timer = loop.call_later(self._seconds, self._work)
