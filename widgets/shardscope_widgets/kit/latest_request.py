"""Slow requests in a background thread, of which only the latest is worth an answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class _Request(Generic[Question, Answer]):
    question: Question
    on_result: Callable[[Answer | Exception], None]
    loop: asyncio.AbstractEventLoop | None
    """The kernel's event loop, on which inputs may be set; None in a script."""

    def deliver(self, result: Answer | Exception) -> None:
        call_in_loop(self.loop, lambda: self.on_result(result))


class LatestRequest(Generic[Question, Answer]):
    """A worker that computes one answer at a time, that of the latest question, and keeps it."""

    def __init__(self, compute: Callable[[Question], Answer], name: str) -> None:
        """Create the worker. ``compute`` runs in a thread called ``name``."""
        self._compute, self._name = compute, name
        self._lock = threading.Lock()
        self._requests: list[_Request[Question, Answer]] = []
        self._known: tuple[Question, Answer | Exception] | None = None
        self.is_busy = False
        """Whether an answer is being computed."""

    def request(self, question: Question, on_result: Callable[[Answer | Exception], None]) -> None:
        """Call ``on_result`` with the answer or the exception, unless another question comes meanwhile."""
        with self._lock:
            known = self._known
            if known is None or known[0] != question:
                known = None
                self._requests.append(_Request(question, on_result, find_running_loop()))
                starts, self.is_busy = not self.is_busy, True
        if known is not None:
            on_result(known[1])
        elif starts:
            threading.Thread(target=self._run_requests, daemon=True, name=self._name).start()

    def _run_requests(self) -> None:
        while True:
            with self._lock:
                if not self._requests:
                    self.is_busy = False
                    return
                question = self._requests[-1].question
            result: Answer | Exception
            try:
                result = self._compute(question)
            except Exception as error:  # An exception raised in a thread would not be shown.
                result = error
            with self._lock:
                self._known = (question, result)
                finished = [entry for entry in self._requests if entry.question == question]
                # Older requests are dropped: their views show something else by now.
                later = self._requests.index(finished[-1]) + 1
                self._requests = [entry for entry in self._requests[later:] if entry.question != question]
            for request in finished:
                request.deliver(result)


def find_running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that calls this; None in a script and in another thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def call_in_loop(loop: asyncio.AbstractEventLoop | None, call: Callable[[], None]) -> None:
    """Make ``call`` in ``loop``, from another thread; at once without a loop."""
    if loop is None:
        call()
    # A closed loop has nothing left that waits for the call.
    elif not loop.is_closed():
        loop.call_soon_threadsafe(call)
