"""The background search for the cheapest changes that make a plan fit, shared by all its buttons."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

import shardscope as ss
from shardscope.planner.repairs.make_it_fit import Fit, make_it_fit

Result = Fit | Exception | None
"""The changes that make the plan fit, None if there are none, or the exception raised by the search."""


@dataclass(frozen=True)
class _Request:
    plan: ss.Plan
    on_result: Callable[[Result], None]
    loop: asyncio.AbstractEventLoop | None
    """The kernel's event loop, on which inputs may be set; None in a script."""

    def deliver(self, result: Result) -> None:
        if self.loop is None:
            self.on_result(result)
        else:
            self.loop.call_soon_threadsafe(self.on_result, result)


class FitSearch:
    """A search for one plan at a time, the latest requested. A large cluster takes seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[_Request] = []
        self._known: tuple[ss.Plan, Result] | None = None
        self.is_searching = False

    def request(self, plan: ss.Plan, on_result: Callable[[Result], None]) -> None:
        """Call ``on_result`` with what makes ``plan`` fit, unless another plan is requested meanwhile."""
        with self._lock:
            known = self._known
            if known is None or known[0] != plan:
                known = None
                self._requests.append(_Request(plan, on_result, _running_loop()))
                starts, self.is_searching = not self.is_searching, True
        if known is not None:
            on_result(known[1])
        elif starts:
            threading.Thread(target=self._run_searches, daemon=True, name="shardscope-make-it-fit").start()

    def _run_searches(self) -> None:
        while True:
            with self._lock:
                if not self._requests:
                    self.is_searching = False
                    return
                plan = self._requests[-1].plan
            result: Result
            try:
                result = make_it_fit(plan)
            except Exception as error:  # An exception raised in a thread would not be shown.
                result = error
            with self._lock:
                self._known = (plan, result)
                finished = [entry for entry in self._requests if entry.plan == plan]
                # Requests for older plans are dropped: their views show another plan by now.
                later = self._requests.index(finished[-1]) + 1
                self._requests = [entry for entry in self._requests[later:] if entry.plan != plan]
            for request in finished:
                request.deliver(result)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
