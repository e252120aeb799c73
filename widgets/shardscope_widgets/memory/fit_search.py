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
class _Question:
    plan: ss.Plan
    on_found: Callable[[Result], None]
    loop: asyncio.AbstractEventLoop | None
    """The kernel's event loop, on which inputs may be set; None in a script."""

    def answer(self, found: Result) -> None:
        if self.loop is None:
            self.on_found(found)
        else:
            self.loop.call_soon_threadsafe(self.on_found, found)


class FitSearch:
    """A search for one plan at a time, the latest requested. A large cluster takes seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._questions: list[_Question] = []
        self._known: tuple[ss.Plan, Result] | None = None
        self.is_searching = False

    def ask(self, plan: ss.Plan, on_found: Callable[[Result], None]) -> None:
        """Call ``on_found`` with what makes ``plan`` fit, unless another plan is requested meanwhile."""
        with self._lock:
            known = self._known
            if known is None or known[0] != plan:
                known = None
                self._questions.append(_Question(plan, on_found, _running_loop()))
                starts, self.is_searching = not self.is_searching, True
        if known is not None:
            on_found(known[1])
        elif starts:
            threading.Thread(target=self._search, daemon=True, name="shardscope-make-it-fit").start()

    def _search(self) -> None:
        while True:
            with self._lock:
                if not self._questions:
                    self.is_searching = False
                    return
                plan = self._questions[-1].plan
            found: Result
            try:
                found = make_it_fit(plan)
            except Exception as error:  # An exception raised in a thread would not be shown.
                found = error
            with self._lock:
                self._known = (plan, found)
                asked = [one for one in self._questions if one.plan == plan]
                later = self._questions.index(asked[-1]) + 1
                self._questions = [one for one in self._questions[later:] if one.plan != plan]
            for question in asked:
                question.answer(found)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
