"""Calls that are made later: slow ones in a background thread, and those that wait until the user pauses."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")
Computation = Callable[[], Callable[[], None]]
"""Computes, and returns a call that shows the result."""


@dataclass(frozen=True)
class _Request(Generic[Question, Answer]):
    question: Question
    on_result: Callable[[Answer | Exception], None]
    loop: asyncio.AbstractEventLoop | None
    """The kernel's event loop, on which inputs may be set; None in a script."""

    def deliver(self, result: Answer | Exception) -> None:
        call_in_loop(self.loop, lambda: self.on_result(result))


def try_call(call: Callable[[], Answer]) -> Answer | Exception:
    """Return the result of ``call``, or its exception: one raised in a thread or handler is not shown."""
    try:
        return call()
    except Exception as error:
        return error


def call_in_thread(
    call: Callable[[], Answer], on_result: Callable[[Answer | Exception], None], name: str
) -> None:
    """Make a slow call in a thread called ``name``; ``on_result`` gets its result in the calling loop."""
    loop = find_running_loop()

    def run() -> None:
        result = try_call(call)
        call_in_loop(loop, lambda: on_result(result))

    threading.Thread(target=run, daemon=True, name=name).start()


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
            result = try_call(partial(self._compute, question))
            with self._lock:
                self._known = (question, result)
                finished = [entry for entry in self._requests if entry.question == question]
                # Older requests are dropped: their views show something else by now.
                later = self._requests.index(finished[-1]) + 1
                self._requests = [entry for entry in self._requests[later:] if entry.question != question]
            for request in finished:
                request.deliver(result)


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
