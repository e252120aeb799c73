"""Slow calls in one background thread, in order, whose effects come back to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from shardscope_widgets.kit.latest_request import call_in_loop, find_running_loop

Computation = Callable[[], Callable[[], None]]
"""Computes, and returns a call that shows the result."""


class BackgroundCalls:
    """A queue of computations. Its thread ends when the queue is empty, so that nothing is left to close."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Computation, asyncio.AbstractEventLoop]] = deque()
        self._is_running = False

    def run(self, compute: Computation) -> None:
        """Compute in the thread and show the result in the loop that calls this; at once without a loop."""
        loop = find_running_loop()
        if loop is None:
            compute()()
            return
        with self._lock:
            self._waiting.append((compute, loop))
            starts, self._is_running = not self._is_running, True
        if starts:
            threading.Thread(target=self._run_waiting, daemon=True, name=self._name).start()

    def _run_waiting(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                compute, loop = self._waiting.popleft()
            try:
                show = compute()
            except Exception as error:
                # An exception raised in a thread would not be shown; in the loop it is, as without a thread.
                show = _make_raise(error)
            call_in_loop(loop, show)


def _make_raise(error: Exception) -> Callable[[], None]:
    def raise_error() -> None:
        raise error

    return raise_error
