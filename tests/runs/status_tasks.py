"""Tasks whose end is easily misread: their output is gone, something is left behind, or they never ran."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any


class Output:
    """Each rank, and a single one as ``first``, does another harm to its standard streams, and returns."""

    HARMS = ("none", "closed", "without_flush", "descriptors_closed")

    def __init__(self, first: str = "none") -> None:
        self.harms = (first, *(harm for harm in self.HARMS if harm != first))

    def __call__(self, ctx: Any) -> None:
        print(f"rank {ctx.rank} speaks", flush=True)
        getattr(self, self.harms[ctx.rank])()

    def none(self) -> None:
        sys.stdout = sys.stderr = None  # type: ignore[assignment]

    def closed(self) -> None:
        sys.stdout.close()
        sys.stderr.close()

    def without_flush(self) -> None:
        class Silent:
            def write(self, text: str) -> int:
                return len(text)

        sys.stdout = sys.stderr = Silent()  # type: ignore[assignment]

    def descriptors_closed(self) -> None:
        print("never flushed", end="")
        os.close(1)
        os.close(2)


class FailsWithoutOutput(Output):
    """Does the same, and raises."""

    def __call__(self, ctx: Any) -> None:
        super().__call__(ctx)
        raise LookupError("after all output was gone")


def returns_for_a_stop_or_a_file(ctx: Any) -> None:
    """Return for a stop, or once there is a file named "return" in the run folder."""
    ctx.log(step=0)
    while not ctx.should_stop and not (ctx.folder / "return").exists():
        time.sleep(0.02)


def for_ever() -> None:
    while True:
        time.sleep(0.1)


def leaves_a_thread_and_a_daemon(ctx: Any) -> None:
    """The last rank leaves a thread, which is no daemon. Others fork twice, as daemons do, with all pipes."""
    if ctx.rank == ctx.world_size - 1:
        threading.Thread(target=for_ever, name="left behind").start()
    elif os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for_ever()
        os._exit(0)
    else:
        os.wait()


def leaves_a_save(ctx: Any) -> None:
    """A thread writes on for three seconds, as an asynchronous checkpoint does."""

    def save() -> None:
        with (ctx.folder / "saved.bin").open("wb", buffering=0) as file:
            for _ in range(30):
                file.write(bytes(2**20))
                time.sleep(0.1)

    threading.Thread(target=save).start()


def crashes_at_exit(ctx: Any) -> None:
    """A library's clean-up crashes, when all work is done."""
    atexit.register(os.kill, os.getpid(), signal.SIGSEGV)


def leaves_a_child(ctx: Any) -> None:
    """Starts a process in the run's own session, and works on."""
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(1000) # {ctx.folder}"])
    ctx.log(child=child.pid)
    time.sleep(1000)


async def asynchronous(ctx: Any) -> None:
    ctx.log(ran=True)


def generator(ctx: Any) -> Any:
    ctx.log(ran=True)
    yield


async def asynchronous_generator(ctx: Any) -> Any:
    ctx.log(ran=True)
    yield


class Asynchronous:
    async def __call__(self, ctx: Any) -> None:
        ctx.log(ran=True)

    def generate(self, ctx: Any) -> Any:
        yield ctx


def returns_a_coroutine(ctx: Any) -> Any:
    """Nobody can see from outside that a call of this runs nothing."""
    return asynchronous(ctx)


def exits_with_0(ctx: Any) -> None:
    """Rank 1 leaves by sys.exit(0) while rank 0 waits for it."""
    if ctx.rank == ctx.world_size - 1:
        sys.exit(0)
    ctx.barrier()


def exits_with_nothing(ctx: Any) -> None:
    sys.exit()


def writes_beyond_the_limit(ctx: Any) -> None:
    """Prints and logs more than RLIMIT_FSIZE allows a file to have."""
    for step in range(2000):
        print("x" * 100)
        ctx.log(loss=float(step), words="y" * 50)
    ctx.barrier()
