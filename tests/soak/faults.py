"""What befalls a launch of the soak, and what its folder has to say afterwards."""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.soak import tasks
from tests.soak.launched import Launched, wait_until

import shardscope as ss

Work = Callable[[random.Random, int], Any]
"""Makes a task for so many ranks; None: any of :mod:`tests.soak.choices`, which goes on until it is ended."""
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of mishap."""

    name: str
    strike: Callable[[Launched, random.Random], None]
    expected: str
    """A pattern of ``status: reason``, which ``Run`` and a fresh look at the folder both have to match."""
    work: Work | None = None
    ends_alone: bool = False
    """Whether the run ends by itself, so that its time counts from the launch on and not from the strike."""
    where: str = "here"
    """``here``: the soak launches; ``kernel``: a process that it starts, which then holds the lease;
    ``outlived``: the same, and the run shall outlive it; ``twice``: here, two at once."""


def _nothing(_: Launched, __: random.Random) -> None:
    pass


def _stop_at_start(launched: Launched, chance: random.Random) -> None:
    time.sleep(chance.uniform(0, 2))
    launched.strikes()
    launched.run.stop()


def _stop(launched: Launched, chance: random.Random) -> None:
    launched.wait_for_steps(chance)
    launched.strikes()
    launched.run.stop()


def _stop_twice(launched: Launched, chance: random.Random) -> None:
    launched.wait_for_steps(chance)
    launched.strikes()
    both = [threading.Thread(target=launched.run.stop) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()


def _stop_and_save(launched: Launched, chance: random.Random) -> None:
    launched.wait_for_steps(chance)
    launched.strikes()
    launched.run.stop(checkpoint=True)


def _stop_near_the_end(launched: Launched, chance: random.Random) -> None:
    launched.wait_for_steps(chance, most_seconds=1.5)
    launched.strikes()
    launched.run.stop()


def _signal(who: str, number: int, *, at_start: bool = False) -> Callable[[Launched, random.Random], None]:
    def strike(launched: Launched, chance: random.Random) -> None:
        if at_start:
            rank = chance.randrange(launched.run.world_size)
            wait_until(lambda: launched.pid_of_rank(rank) is not None)
        else:
            launched.wait_for_steps(chance)
            rank = chance.randrange(launched.run.world_size)
        launched.strikes()
        launched.signal(who, number, rank)

    return strike


def _halt_and_stop(who: str) -> Callable[[Launched, random.Random], None]:
    halt = _signal(who, signal.SIGSTOP)

    def strike(launched: Launched, chance: random.Random) -> None:
        halt(launched, chance)
        time.sleep(chance.uniform(0, 0.5))
        launched.strikes()
        launched.run.stop()

    return strike


def _kill_kernel(launched: Launched, chance: random.Random) -> None:
    if chance.random() < 0.3:
        time.sleep(chance.uniform(0, 1))
    else:
        launched.wait_for_steps(chance)
    launched.strikes()
    launched.kill_kernel()


def _kill_kernel_at_once(launched: Launched, _: random.Random) -> None:
    launched.kill_kernel()
    launched.strikes()


def _delete_folder(launched: Launched, chance: random.Random) -> None:
    launched.wait_for_steps(chance)
    # A status that is written just then would make its file anew, in a folder that is gone: nothing does.
    wait_until(lambda: launched.run.status == "running")
    launched.strikes()
    while launched.run.folder.exists():  # Ranks may write into it under our hands.
        shutil.rmtree(launched.run.folder, ignore_errors=True)


def _fails(how: str) -> Work:
    return lambda chance, ranks: tasks.Fails(
        how, chance.randrange(ranks), chance.randrange(5), together=chance.random() < 0.5
    )


def _few_steps(chance: random.Random, _: int) -> Any:
    return tasks.Steps(chance.randrange(1, 10), together=chance.random() < 0.5)


def _half_a_second(_: random.Random, __: int) -> Any:
    return tasks.Steps(25)


def _saves(chance: random.Random, _: int) -> Any:
    return tasks.UntilAsked() if chance.random() < 0.6 else ss.Pretrain(num_steps=tasks.FOREVER)


def _port_taken(chance: random.Random, ranks: int) -> Any:
    return tasks.PortTaken(_few_steps(chance, ranks))


RETURNED = r"finished: the task returned on every rank"
STOPPED = r"stopped: run\.stop\(\) was called"
FAULTS = (
    Fault(name="none", strike=_nothing, expected=RETURNED, work=_few_steps, ends_alone=True),
    Fault(
        name="two at once",
        strike=_nothing,
        expected=RETURNED,
        work=_few_steps,
        ends_alone=True,
        where="twice",
    ),
    Fault(
        name="a flood of log",
        strike=_nothing,
        expected=RETURNED,
        work=lambda chance, _: tasks.Floods(chance.randrange(1, 20) * MIB),
        ends_alone=True,
    ),
    Fault(name="the port taken", strike=_nothing, expected=RETURNED, work=_port_taken, ends_alone=True),
    Fault(name="stop during start-up", strike=_stop_at_start, expected=STOPPED),
    Fault(name="stop mid step", strike=_stop, expected=STOPPED + "$"),
    Fault(name="stop twice at once", strike=_stop_twice, expected=STOPPED + "$"),
    Fault(
        name="stop with a checkpoint",
        strike=_stop_and_save,
        expected=r"stopped: run\.stop\(checkpoint=True\) was called: every rank returned from the task",
        work=_saves,
    ),
    Fault(
        name="stop near the end",
        strike=_stop_near_the_end,
        expected=f"{STOPPED}|{RETURNED}",
        work=_half_a_second,
    ),
    Fault(
        name="stop of ranks that ignore SIGTERM",
        strike=_stop,
        expected=STOPPED + "$",
        work=lambda *_: tasks.Deaf(),
    ),
    Fault(
        name="stop of ranks that left processes",
        strike=_stop,
        expected=STOPPED + "$",
        work=lambda *_: tasks.LeavesChildren(),
    ),
    Fault(name="a rank halted (SIGSTOP), then stop", strike=_halt_and_stop("rank"), expected=STOPPED + "$"),
    Fault(name="the launcher halted, then stop", strike=_halt_and_stop("launcher"), expected=STOPPED + "$"),
    Fault(
        name="kill -9 of a rank",
        strike=_signal("rank", signal.SIGKILL),
        expected=r"failed: rank \d+ was killed by SIGKILL",
    ),
    Fault(
        name="kill -9 of a rank during start-up",
        strike=_signal("rank", signal.SIGKILL, at_start=True),
        expected=r"failed: rank \d+ was killed by SIGKILL",
    ),
    Fault(
        name="kill -9 of the launcher",
        strike=_signal("launcher", signal.SIGKILL),
        expected=r"failed: (the launcher|rank 0) was killed by SIGKILL",
    ),
    Fault(
        name="kill -9 of the supervisor",
        strike=_signal("supervisor", signal.SIGKILL),
        expected=r"lost: its supervisor \(process \d+\) is gone",
    ),
    Fault(
        name="kill -9 of the supervisor, ranks left processes",
        strike=_signal("supervisor", signal.SIGKILL),
        expected=r"lost: its supervisor \(process \d+\) is gone",
        work=lambda *_: tasks.LeavesChildren(own_session=False),
    ),
    Fault(
        name="SIGTERM to the supervisor",
        strike=_signal("supervisor", signal.SIGTERM),
        expected=r"stopped: the supervisor got SIGTERM",
    ),
    Fault(
        name="kill -9 of the kernel",
        strike=_kill_kernel,
        expected=r"stopped: the kernel that launched it ended",
        where="kernel",
    ),
    Fault(
        name="kill -9 of the kernel, outlived",
        strike=_kill_kernel_at_once,
        expected=RETURNED,
        work=_few_steps,
        ends_alone=True,
        where="outlived",
    ),
    Fault(name="the folder deleted", strike=_delete_folder, expected=r"lost: its folder is gone"),
    Fault(
        name="a rank raises",
        strike=_nothing,
        expected=r"failed: rank \d+ raised LookupError: the soak's own",
        work=_fails("raises"),
        ends_alone=True,
    ),
    Fault(
        name="a rank raises beside one that ignores SIGTERM",
        strike=_nothing,
        expected=r"failed: rank \d+ raised LookupError: the soak's own",
        work=lambda *_: tasks.Deaf(raising=True),
        ends_alone=True,
    ),
    Fault(
        name="sys.exit(3) in a rank",
        strike=_nothing,
        expected=r"failed: rank \d+ called sys\.exit\(3\)",
        work=_fails("exits"),
        ends_alone=True,
    ),
    Fault(
        name="os._exit(7) in a rank",
        strike=_nothing,
        expected=r"failed: rank \d+ exited with code 7",
        work=_fails("exits at once"),
        ends_alone=True,
    ),
    Fault(
        name="a segmentation fault in a rank",
        strike=_nothing,
        expected=r"failed: rank \d+ crashed with SIGSEGV",
        work=_fails("segfaults"),
        ends_alone=True,
    ),
)
