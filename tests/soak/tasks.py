"""Tasks of the soak's ranks, and failures inside them. Ranks import no other module of the tests."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from shardscope.machine import processes

KEY = "SOAK_API_KEY"
"""Environment variable with a secret that no file of a run may contain."""
FOREVER = 1_000_000
"""Number of steps of a run that has to be ended."""


class Steps:
    """``count`` steps of about ``seconds``; with ``collective`` the ranks wait for each other in each."""

    def __init__(self, count: int = FOREVER, seconds: float = 0.02, *, collective: bool = False) -> None:
        self.count, self.seconds, self.collective = count, seconds, collective

    def __call__(self, ctx: Any) -> None:
        print("my key is", os.environ[KEY])
        for step in range(self.count):
            self.before_step(ctx, step)
            if self.collective:
                import torch
                import torch.distributed as dist

                dist.all_reduce(torch.ones(1))
            ctx.log(loss=1.0 / (step + 1))
            time.sleep(self.seconds)

    def before_step(self, ctx: Any, step: int) -> None:
        """Do nothing; subclasses override it."""


class StepsUntilStop:
    """Steps until a stop is requested, which all ranks notice at the same step."""

    def __call__(self, ctx: Any) -> None:
        while not ctx.should_stop:
            ctx.log(loss=1.0)
            time.sleep(0.01)


class Fails(Steps):
    """Rank ``rank`` fails by ``how`` before step ``step``, while the others wait for it or continue."""

    def __init__(self, how: str, rank: int, step: int, *, collective: bool) -> None:
        super().__init__(collective=collective)
        self.how, self.rank, self.step = how, rank, step

    def before_step(self, ctx: Any, step: int) -> None:
        if ctx.rank == self.rank and step == self.step:
            FAILURES[self.how]()


def _raise_lookup_error() -> None:
    raise LookupError("the soak's own")


def _segfault() -> None:
    ctypes.string_at(0)


FAILURES: dict[str, Callable[[], object]] = {
    "raises": _raise_lookup_error,
    "exits": lambda: sys.exit(3),
    "exits at once": lambda: os._exit(7),
    "segfaults": _segfault,
}


class IgnoresSignals(Steps):
    """Ranks that ignore SIGTERM, SIGINT and SIGHUP; with ``raising`` the last one raises as well."""

    def __init__(self, raising: bool = False) -> None:
        super().__init__()
        self.raising = raising

    def before_step(self, ctx: Any, step: int) -> None:
        if self.raising and ctx.rank == ctx.world_size - 1 and step == 3:
            _raise_lookup_error()
        if step == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)


class PrintsALot:
    """Each rank prints ``num_bytes`` without a newline, with color codes and invalid UTF-8."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def __call__(self, ctx: Any) -> None:
        print("my key is", os.environ[KEY])
        for _ in range(self.num_bytes // 100_000):
            os.write(1, b"\x1b[31m\xff\xfe" + b"y" * 99_993)
        ctx.log(loss=1.0)


class LeavesChildren(Steps):
    """Each rank starts a process with an empty environment and, by default, in another session."""

    def __init__(self, *, own_session: bool = True) -> None:
        super().__init__()
        self.own_session = own_session

    def before_step(self, ctx: Any, step: int) -> None:
        if step == 0:
            command = [sys.executable, "-I", "-c", "import time; time.sleep(1000)"]
            subprocess.Popen(command, env={}, start_new_session=self.own_session)


class PortTaken:
    """``task`` in a launcher whose chosen port is taken by another process."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def __call__(self, ctx: Any) -> None:
        """Never called: the launcher unpickles the task itself."""
        raise AssertionError

    def __reduce__(self) -> Any:
        return _take_port, (self.task,)


def _take_port(task: Any) -> Any:
    """Make every port that the launcher chooses taken, while it unpickles the task."""
    sockets: list[socket.socket] = []

    def choose_taken_port() -> int:
        port = processes.find_free_port()
        thief = socket.socket()
        thief.bind(("127.0.0.1", port))
        thief.listen()
        sockets.append(thief)
        return port

    sys.modules["__main__"].find_free_port = choose_taken_port  # type: ignore[attr-defined]
    return task
