"""The faults of the soak, and the status that each run folder must have afterwards."""

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
from tests.soak.launched_run import Launched, wait_until

import shardscope as ss

MakeTask = Callable[[random.Random, int], Any]
"""Function of a random number generator and the number of ranks that returns a task."""
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault."""

    name: str
    inject: Callable[[Launched, random.Random], None]
    expected: str
    """Pattern of ``status: reason``, both of the launched ``Run`` and of a new handle on its folder."""
    make_task: MakeTask | None = None
    """None: any task of :mod:`tests.soak.choices`, which runs until it is ended."""
    ends_by_itself: bool = False
    """Whether the run ends by itself, so that its time counts from the launch instead of the fault."""
    where: str = "here"
    """``here``: launched by the soak's process; ``kernel``: by a process that then holds the lease;
    ``outlived``: the same with ``outlive_kernel=True``; ``twice``: two launches here at once."""


def _do_nothing(_: Launched, __: random.Random) -> None:
    pass


def _stop_at_start(launched: Launched, rng: random.Random) -> None:
    time.sleep(rng.uniform(0, 2))
    launched.start_clock()
    launched.run.stop()


def _stop_process(launched: Launched, rng: random.Random) -> None:
    launched.wait_for_steps(rng)
    launched.start_clock()
    launched.run.stop()


def _stop_twice(launched: Launched, rng: random.Random) -> None:
    launched.wait_for_steps(rng)
    launched.start_clock()
    both = [threading.Thread(target=launched.run.stop) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()


def _stop_and_save(launched: Launched, rng: random.Random) -> None:
    launched.wait_for_steps(rng)
    launched.start_clock()
    launched.run.stop(checkpoint=True)


def _stop_near_the_end(launched: Launched, rng: random.Random) -> None:
    launched.wait_for_steps(rng, max_seconds=1.5)
    launched.start_clock()
    launched.run.stop()


def _send_signal(
    who: str, number: int, *, at_start: bool = False
) -> Callable[[Launched, random.Random], None]:
    def inject(launched: Launched, rng: random.Random) -> None:
        if at_start:
            rank = rng.randrange(launched.run.world_size)
            wait_until(lambda: launched.pid_of_rank(rank) is not None)
        else:
            launched.wait_for_steps(rng)
            rank = rng.randrange(launched.run.world_size)
        launched.start_clock()
        launched.signal(who, number, rank)

    return inject


def _halt_and_stop(who: str) -> Callable[[Launched, random.Random], None]:
    halt = _send_signal(who, signal.SIGSTOP)

    def inject(launched: Launched, rng: random.Random) -> None:
        halt(launched, rng)
        time.sleep(rng.uniform(0, 0.5))
        launched.start_clock()
        launched.run.stop()

    return inject


def _kill_kernel(launched: Launched, rng: random.Random) -> None:
    if rng.random() < 0.3:
        time.sleep(rng.uniform(0, 1))
    else:
        launched.wait_for_steps(rng)
    launched.start_clock()
    launched.kill_kernel()


def _kill_kernel_at_once(launched: Launched, _: random.Random) -> None:
    launched.kill_kernel()
    launched.start_clock()


def _delete_folder(launched: Launched, rng: random.Random) -> None:
    launched.wait_for_steps(rng)
    # A status written at that time would create its file again, so wait for the last one before the end.
    wait_until(lambda: launched.run.status == "running")
    launched.start_clock()
    while launched.run.folder.exists():  # Ranks may create files meanwhile.
        shutil.rmtree(launched.run.folder, ignore_errors=True)


def _make_failing(how: str) -> MakeTask:
    return lambda rng, ranks: tasks.Fails(
        how, rng.randrange(ranks), rng.randrange(5), collective=rng.random() < 0.5
    )


def _make_few_steps(rng: random.Random, _: int) -> Any:
    return tasks.Steps(rng.randrange(1, 10), collective=rng.random() < 0.5)


def _make_half_a_second(_: random.Random, __: int) -> Any:
    return tasks.Steps(25)


def _make_saving(rng: random.Random, _: int) -> Any:
    return tasks.StepsUntilStop() if rng.random() < 0.6 else ss.Pretrain(num_steps=tasks.FOREVER)


def _make_port_taken(rng: random.Random, ranks: int) -> Any:
    return tasks.PortTaken(_make_few_steps(rng, ranks))


RETURNED = r"finished: the task returned on every rank"
STOPPED = r"stopped: run\.stop\(\) was called"
FAULTS = (
    Fault(name="none", inject=_do_nothing, expected=RETURNED, make_task=_make_few_steps, ends_by_itself=True),
    Fault(
        name="two at once",
        inject=_do_nothing,
        expected=RETURNED,
        make_task=_make_few_steps,
        ends_by_itself=True,
        where="twice",
    ),
    Fault(
        name="a flood of log",
        inject=_do_nothing,
        expected=RETURNED,
        make_task=lambda rng, _: tasks.PrintsALot(rng.randrange(1, 20) * MIB),
        ends_by_itself=True,
    ),
    Fault(
        name="the port taken",
        inject=_do_nothing,
        expected=RETURNED,
        make_task=_make_port_taken,
        ends_by_itself=True,
    ),
    Fault(name="stop during start-up", inject=_stop_at_start, expected=STOPPED),
    Fault(name="stop mid step", inject=_stop_process, expected=STOPPED + "$"),
    Fault(name="stop twice at once", inject=_stop_twice, expected=STOPPED + "$"),
    Fault(
        name="stop with a checkpoint",
        inject=_stop_and_save,
        expected=r"stopped: run\.stop\(checkpoint=True\) was called: every rank returned from the task",
        make_task=_make_saving,
    ),
    Fault(
        name="stop near the end",
        inject=_stop_near_the_end,
        expected=f"{STOPPED}|{RETURNED}",
        make_task=_make_half_a_second,
    ),
    Fault(
        name="stop of ranks that ignore SIGTERM",
        inject=_stop_process,
        expected=STOPPED + "$",
        make_task=lambda *_: tasks.IgnoresSignals(),
    ),
    Fault(
        name="stop of ranks that left processes",
        inject=_stop_process,
        expected=STOPPED + "$",
        make_task=lambda *_: tasks.LeavesChildren(),
    ),
    Fault(name="a rank halted (SIGSTOP), then stop", inject=_halt_and_stop("rank"), expected=STOPPED + "$"),
    Fault(name="the launcher halted, then stop", inject=_halt_and_stop("launcher"), expected=STOPPED + "$"),
    Fault(
        name="kill -9 of a rank",
        inject=_send_signal("rank", signal.SIGKILL),
        expected=r"failed: rank \d+ was killed by SIGKILL",
    ),
    Fault(
        name="kill -9 of a rank during start-up",
        inject=_send_signal("rank", signal.SIGKILL, at_start=True),
        expected=r"failed: rank \d+ was killed by SIGKILL",
    ),
    Fault(
        name="kill -9 of the launcher",
        inject=_send_signal("launcher", signal.SIGKILL),
        expected=r"failed: (the launcher|rank 0) was killed by SIGKILL",
    ),
    Fault(
        name="kill -9 of the supervisor",
        inject=_send_signal("supervisor", signal.SIGKILL),
        expected=r"lost: its supervisor \(process \d+\) is gone",
    ),
    Fault(
        name="kill -9 of the supervisor, ranks left processes",
        inject=_send_signal("supervisor", signal.SIGKILL),
        expected=r"lost: its supervisor \(process \d+\) is gone",
        make_task=lambda *_: tasks.LeavesChildren(own_session=False),
    ),
    Fault(
        name="SIGTERM to the supervisor",
        inject=_send_signal("supervisor", signal.SIGTERM),
        expected=r"stopped: the supervisor got SIGTERM",
    ),
    Fault(
        name="kill -9 of the kernel",
        inject=_kill_kernel,
        expected=r"stopped: the kernel that launched it ended",
        where="kernel",
    ),
    Fault(
        name="kill -9 of the kernel, outlived",
        inject=_kill_kernel_at_once,
        expected=RETURNED,
        make_task=_make_few_steps,
        ends_by_itself=True,
        where="outlived",
    ),
    Fault(name="the folder deleted", inject=_delete_folder, expected=r"lost: its folder is gone"),
    Fault(
        name="a rank raises",
        inject=_do_nothing,
        expected=r"failed: rank \d+ raised LookupError: the soak's own",
        make_task=_make_failing("raises"),
        ends_by_itself=True,
    ),
    Fault(
        name="a rank raises beside one that ignores SIGTERM",
        inject=_do_nothing,
        expected=r"failed: rank \d+ raised LookupError: the soak's own",
        make_task=lambda *_: tasks.IgnoresSignals(raising=True),
        ends_by_itself=True,
    ),
    Fault(
        name="sys.exit(3) in a rank",
        inject=_do_nothing,
        expected=r"failed: rank \d+ called sys\.exit\(3\)",
        make_task=_make_failing("exits"),
        ends_by_itself=True,
    ),
    Fault(
        name="os._exit(7) in a rank",
        inject=_do_nothing,
        expected=r"failed: rank \d+ exited with code 7",
        make_task=_make_failing("exits at once"),
        ends_by_itself=True,
    ),
    Fault(
        name="a segmentation fault in a rank",
        inject=_do_nothing,
        expected=r"failed: rank \d+ crashed with SIGSEGV",
        make_task=_make_failing("segfaults"),
        ends_by_itself=True,
    ),
)
