"""What the soak's ranks do, and what befalls them from within. Ranks import nothing else of the tests."""

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
"""Environment variable with what no file of a run may hold."""
FOREVER = 1_000_000
"""Steps: somebody has to end it."""


class Steps:
    """``count`` steps of about ``seconds``; ``together``: each waits for all ranks."""

    def __init__(self, count: int = FOREVER, seconds: float = 0.02, *, together: bool = False) -> None:
        self.count, self.seconds, self.together = count, seconds, together

    def __call__(self, ctx: Any) -> None:
        print("my key is", os.environ[KEY])
        for step in range(self.count):
            self.before_step(ctx, step)
            if self.together:
                import torch
                import torch.distributed as dist

                dist.all_reduce(torch.ones(1))
            ctx.log(loss=1.0 / (step + 1))
            time.sleep(self.seconds)

    def before_step(self, ctx: Any, step: int) -> None:
        """For those below."""


class UntilAsked:
    """Steps until a stop is asked, which all ranks see at the same step."""

    def __call__(self, ctx: Any) -> None:
        while not ctx.should_stop:
            ctx.log(loss=1.0)
            time.sleep(0.01)


class Fails(Steps):
    """Rank ``rank`` fails by ``how`` before step ``step``, while the others wait for it or go on."""

    def __init__(self, how: str, rank: int, step: int, *, together: bool) -> None:
        super().__init__(together=together)
        self.how, self.rank, self.step = how, rank, step

    def before_step(self, ctx: Any, step: int) -> None:
        if ctx.rank == self.rank and step == self.step:
            FAILURES[self.how]()


def _raises() -> None:
    raise LookupError("the soak's own")


def _segfaults() -> None:
    ctypes.string_at(0)


FAILURES: dict[str, Callable[[], object]] = {
    "raises": _raises,
    "exits": lambda: sys.exit(3),
    "exits at once": lambda: os._exit(7),
    "segfaults": _segfaults,
}


class Deaf(Steps):
    """Ranks that ignore every polite signal; with ``raising``, the last one fails beside them."""

    def __init__(self, raising: bool = False) -> None:
        super().__init__()
        self.raising = raising

    def before_step(self, ctx: Any, step: int) -> None:
        if self.raising and ctx.rank == ctx.world_size - 1 and step == 3:
            _raises()
        if step == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)


class Floods:
    """Each rank prints ``num_bytes``, without a newline, in colours and in bytes that are no UTF-8."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def __call__(self, ctx: Any) -> None:
        print("my key is", os.environ[KEY])
        for _ in range(self.num_bytes // 100_000):
            os.write(1, b"\x1b[31m\xff\xfe" + b"y" * 99_993)
        ctx.log(loss=1.0)


class LeavesChildren(Steps):
    """Each rank starts a process that shares none of its environment; by default not its session either."""

    def __init__(self, *, own_session: bool = True) -> None:
        super().__init__()
        self.own_session = own_session

    def before_step(self, ctx: Any, step: int) -> None:
        if step == 0:
            command = [sys.executable, "-I", "-c", "import time; time.sleep(1000)"]
            subprocess.Popen(command, env={}, start_new_session=self.own_session)


class PortTaken:
    """``task``, whose launcher finds the port that it chose taken."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def __call__(self, ctx: Any) -> None:
        """Never: what a launcher unpickles is the task itself."""
        raise AssertionError

    def __reduce__(self) -> Any:
        return _take_port, (self.task,)


def _take_port(task: Any) -> Any:
    """Runs in the launcher when it unpickles the task: whatever is chosen next, somebody else has it."""
    held: list[socket.socket] = []

    def choose() -> int:
        port = processes.find_free_port()
        thief = socket.socket()
        thief.bind(("127.0.0.1", port))
        thief.listen()
        held.append(thief)
        return port

    sys.modules["__main__"].find_free_port = choose  # type: ignore[attr-defined]
    return task
