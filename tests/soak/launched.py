"""One launch of the soak while it goes on: whom to strike, and when."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil

from shardscope.records.files import read_json
from shardscope.records.folder import RunFolder
from shardscope.runs.run import Run

START_SECONDS = 120.0
"""From a launch to the first step of every rank, on a machine that has other things to do."""


class StuckError(Exception):
    """What was waited for did not come."""


def wait_until(condition: Callable[[], Any], seconds: float = START_SECONDS) -> float:
    """How long it took. Raises ``StuckError``."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            raise StuckError(f"not within {seconds:.0f} s")
        time.sleep(0.01)
    return time.monotonic() - start


class Launched:
    """``run`` and, where another process launched it, that ``kernel``."""

    def __init__(self, run: Run, kernel: subprocess.Popen[str] | None = None) -> None:
        self.run, self.kernel = run, kernel
        self.began = time.monotonic()
        self.struck = self.began
        self.ports: set[int] = set()
        self._files = RunFolder(run.folder)
        # As launch left it: the folder may be gone when it is asked for.
        self.supervisor = int((read_json(self._files.supervisor) or {})["pid"])

    def strikes(self) -> None:
        """What is measured begins now."""
        self.note_ports()
        self.struck = time.monotonic()

    def note_ports(self) -> None:
        """Keep the ports that ranks have told of so far."""
        for rank in range(self.run.world_size):
            port = (read_json(self._files.rank(rank)) or {}).get("port")
            if isinstance(port, str) and port.isdecimal():
                self.ports.add(int(port))

    def wait_for_steps(self, chance: random.Random, most_seconds: float = 0.3) -> None:
        """Until every rank has logged a step, and up to ``most_seconds`` more. Raises ``StuckError``."""
        everyone = set(range(self.run.world_size))
        wait_until(lambda: {record["rank"] for record in self.run.metrics()} == everyone)
        time.sleep(chance.uniform(0, most_seconds))

    def pid_of_rank(self, rank: int) -> int | None:
        """None as long as it has not told."""
        pid = (read_json(self._files.rank(rank)) or {}).get("pid")
        return pid if isinstance(pid, int) else None

    def signal(self, who: str, number: int, rank: int) -> None:
        """``who``: "rank", that one; "launcher" or "supervisor"."""
        if who == "supervisor":
            os.kill(self.supervisor, number)
        elif who == "launcher":
            (launcher,) = psutil.Process(self.supervisor).children()
            launcher.send_signal(number)
        elif (pid := self.pid_of_rank(rank)) is not None:
            os.kill(pid, number)

    def kill_kernel(self) -> None:
        """``kill -9`` of the process that launched it."""
        assert self.kernel is not None
        self.kernel.send_signal(signal.SIGKILL)
        self.kernel.wait()

    def close(self) -> None:
        """Let go of the kernel, if there was one."""
        if self.kernel is not None:
            self.kernel.kill()
            self.kernel.wait()
