"""One side of a comparison: the processes of a job that trains, which can be held still and let go.

Held by SIGSTOP, a job costs nothing and notices nothing, so two jobs can take turns of a second on one
machine: whatever else the machine does meanwhile falls on both.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardscope.machine.processes import signal_process
from shardscope.records.json_files import LineTail

POLL_SECONDS = 0.005
LOOK_SECONDS = 1.0
TIMEOUT_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Some steps of one side, while the other is held."""

    step_seconds: float
    """From the end of one step to the end of the next, everything between included."""
    processor_seconds: float
    """Of a step: of all processes of the job together, on whatever cores."""


class Side:
    """``root`` and all processes below it; rank 0 appends a line of JSON with ``time`` to ``steps`` at each
    step's end.

    ``is_over`` tells whether the job has ended, ``why`` gives its last words.
    """

    def __init__(
        self, root: int, steps: Path, *, is_over: Callable[[], bool], why: Callable[[], str]
    ) -> None:
        self.root = root
        self._steps = LineTail(steps)
        self._is_over, self._why = is_over, why
        self._pids: list[int] = []
        self.ends: list[float] = []
        """When each step ended, in seconds since the epoch."""

    def hold(self) -> None:
        """Stop all of it, who watches before who is watched."""
        for pid in self._find():
            signal_process(pid, signal.SIGSTOP)

    def go(self) -> None:
        """Let it go on."""
        for pid in reversed(self._find()):
            signal_process(pid, signal.SIGCONT)

    def wait_for(self, num_steps: int) -> None:
        """Until so many steps have ended. Raises ``RuntimeError`` if the job ends before."""
        begun = looked = time.monotonic()
        while self._see() < num_steps:
            now = time.monotonic()
            # Seldom: it reads files and costs the one side more than the other.
            if now - looked >= LOOK_SECONDS:
                looked = now
                # What it wrote in between counts: it may have ended well.
                if (self._is_over() and self._see() < num_steps) or now - begun > TIMEOUT_SECONDS:
                    raise RuntimeError(f"{len(self.ends)} of {num_steps} steps, then: {self._why()}")
            time.sleep(POLL_SECONDS)

    def wait_for_end(self) -> None:
        """Until the job has ended by itself. Raises ``RuntimeError`` if it does not."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not self._is_over():
            if time.monotonic() > deadline:
                raise RuntimeError(f"it goes on after {TIMEOUT_SECONDS} s: {self._why()}")
            time.sleep(LOOK_SECONDS)

    def take_turn(self, num_steps: int) -> Turn:
        """``num_steps`` steps or one more, after the rest of the one in which the job was held."""
        self.go()
        self.wait_for(len(self.ends) + 1)
        first, before = len(self.ends), self._processor_seconds()
        self.wait_for(first + num_steps)
        last, after = len(self.ends), self._processor_seconds()
        self.hold()
        num_taken = last - first
        return Turn(
            step_seconds=(self.ends[last - 1] - self.ends[first - 1]) / num_taken,
            processor_seconds=(after - before) / num_taken,
        )

    def _see(self) -> int:
        self.ends += [float(line["time"]) for line in self._steps.read() if "time" in line]
        return len(self.ends)

    def _find(self) -> list[int]:
        """Pids of a job that goes on; those of one that has ended may be others' by now."""
        self._pids = []
        if not self._is_over():
            with contextlib.suppress(psutil.NoSuchProcess):
                below = psutil.Process(self.root).children(recursive=True)
                self._pids = [self.root, *(process.pid for process in below)]
        return self._pids

    def _processor_seconds(self) -> float:
        return sum(map(processor_seconds, self._pids))


def processor_seconds(pid: int) -> float:
    """What process ``pid`` and all its threads have had of any core; 0.0 if it is gone."""
    if hasattr(_LIBC, "clock_getcpuclockid"):  # POSIX.1-2001, to the nanosecond; macOS has none.
        clock = ctypes.c_int()
        is_gone = _LIBC.clock_getcpuclockid(pid, ctypes.byref(clock))
        return 0.0 if is_gone else time.clock_gettime(clock.value)
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


_LIBC = ctypes.CDLL(None)
