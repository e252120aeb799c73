"""One launched run of the soak: its processes, ports and steps."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import read_json
from shardscope.runs.run import Run

START_SECONDS = 120.0
"""Maximum time from a launch to the first step of every rank, on a busy machine."""


class StuckError(Exception):
    """Error of a wait that took too long."""


def wait_until(condition: Callable[[], Any], seconds: float = START_SECONDS) -> float:
    """Wait until ``condition`` is true. Return the seconds waited. Raises ``StuckError``."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            raise StuckError(f"not within {seconds:.0f} s")
        time.sleep(0.01)
    return time.monotonic() - start


class Launched:
    """A run and, if another process launched it, that process."""

    def __init__(self, run: Run, kernel: subprocess.Popen[str] | None = None) -> None:
        self.run, self.kernel = run, kernel
        self.started_at = time.monotonic()
        self.clock_started = self.started_at
        self.ports: set[int] = set()
        self._files = RunFolder(run.folder)
        # Read it at once: the folder may be deleted later.
        self.supervisor = int((read_json(self._files.supervisor) or {})["pid"])

    def start_clock(self) -> None:
        """Start the measurement of the time until the run has ended."""
        self.note_ports()
        self.clock_started = time.monotonic()

    def note_ports(self) -> None:
        """Remember the ports that ranks have recorded so far."""
        for rank in range(self.run.world_size):
            port = (read_json(self._files.rank(rank)) or {}).get("port")
            if isinstance(port, str) and port.isdecimal():
                self.ports.add(int(port))

    def wait_for_steps(self, rng: random.Random, max_seconds: float = 0.3) -> None:
        """Wait until every rank has logged a step, and up to ``max_seconds`` more. Raises ``StuckError``."""
        everyone = set(range(self.run.world_size))
        wait_until(lambda: {record["rank"] for record in self.run.metrics()} == everyone)
        time.sleep(rng.uniform(0, max_seconds))

    def pid_of_rank(self, rank: int) -> int | None:
        """Return the rank's process id; None until it is recorded."""
        pid = (read_json(self._files.rank(rank)) or {}).get("pid")
        return pid if isinstance(pid, int) else None

    def signal(self, who: str, number: int, rank: int) -> None:
        """Send signal ``number`` to ``who``: "rank" (number ``rank``), "launcher" or "supervisor"."""
        if who == "supervisor":
            os.kill(self.supervisor, number)
        elif who == "launcher":
            (launcher,) = psutil.Process(self.supervisor).children()
            launcher.send_signal(number)
        elif (pid := self.pid_of_rank(rank)) is not None:
            os.kill(pid, number)

    def kill_kernel(self) -> None:
        """Kill the process that launched the run."""
        assert self.kernel is not None
        self.kernel.send_signal(signal.SIGKILL)
        self.kernel.wait()

    def close(self) -> None:
        """End the launching process, if there is one."""
        if self.kernel is not None:
            self.kernel.kill()
            self.kernel.wait()
