"""Tasks that tests launch. They live in a module of their own, so that ranks import nothing of pytest."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import Any, ClassVar


class Log:
    """Logs ``count`` steps, ``seconds`` apart; polls for a stop if told to."""

    def __init__(self, count: int = 3, seconds: float = 0.0, polite: bool = False) -> None:
        self.count, self.seconds, self.polite = count, seconds, polite

    def __call__(self, ctx: Any) -> None:
        print(f"hello from rank {ctx.rank} of {ctx.world_size} on {ctx.device}")
        for step in range(self.count):
            if self.polite and ctx.should_stop:
                ctx.log(stopped_at=step)
                return
            ctx.log(loss=1.0 / (step + 1))
            time.sleep(self.seconds)


def collective(ctx: Any) -> None:
    """Sum over ranks; also memory, odd values and what the environment says."""
    import torch
    import torch.distributed as dist

    total = torch.ones(1) * (ctx.rank + 1)
    dist.all_reduce(total)
    ctx.barrier()
    ctx.log(total=total, nan=float("nan"), inf=float("inf"), text="ok", nothing=None)
    ctx.log_memory()
    gloo = [dist.group.WORLD._get_backend(ctx.device), dist.new_group()._get_backend(ctx.device)]
    ctx.record(
        "engine",
        {
            "name": "none",
            "backend": dist.get_backend(),
            "threads": torch.get_num_threads(),
            "gloo_threads": [group.options._threads for group in gloo],
        },
    )
    ctx.log(
        step=40,
        port=os.environ["MASTER_PORT"],
        use_cpu=os.environ.get("ACCELERATE_USE_CPU"),
        python_path=os.environ.get("PYTHONPATH"),
    )
    ctx.log(after=True, cuda_in_use=torch.cuda.is_initialized())


def steps_until_stop(ctx: Any) -> None:
    """Collective steps of uneven length: ranks that disagree about the last one would hang."""
    import torch
    import torch.distributed as dist

    step = 0
    while not ctx.should_stop:
        time.sleep(0.005 * (1 + ctx.rank))
        dist.all_reduce(torch.ones(1))
        ctx.log(loss=0.0)
        step += 1
    for command in ctx.commands():
        ctx.log(command=command["command"])
    ctx.log(last_step=step)


class Fail:
    """Rank 1 fails by ``how`` while the others wait for it in a collective."""

    def __init__(self, how: str, rank: int = 1) -> None:
        self.how, self.rank = how, rank

    def __call__(self, ctx: Any) -> None:
        import torch
        import torch.distributed as dist

        ctx.log(begun=True)
        if ctx.rank == self.rank:
            time.sleep(0.2)
            getattr(self, self.how)()
        dist.all_reduce(torch.ones(1))
        dist.barrier()

    def raises(self) -> None:
        raise LookupError("the shard of rank 1 is missing")

    def unspeakable(self) -> None:
        class UnspeakableError(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no words")

        raise UnspeakableError

    def long(self) -> None:
        raise ValueError("x" * 1_000_000)

    def exits(self) -> None:
        sys.exit(3)

    def exits_at_once(self) -> None:
        os._exit(7)

    def exits_as_if_done(self) -> None:
        os._exit(0)

    def segfaults(self) -> None:
        ctypes.string_at(0)

    def killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def deaf(ctx: Any) -> None:
    """Ignores every polite signal."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctx.log(begun=True)
    while True:
        time.sleep(1)


def frozen(ctx: Any) -> None:
    """Rank 0 stops itself, as a debugger or a broken driver would; the others wait in a collective."""
    import torch
    import torch.distributed as dist

    ctx.log(begun=True)
    if ctx.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))


def raises_beside_deaf(ctx: Any) -> None:
    """Rank 1 fails while rank 0 ignores the SIGTERM that torch elastic sends it."""
    if ctx.rank == 0:
        deaf(ctx)
    time.sleep(0.3)
    raise LookupError("rank 1 first")


def with_children(ctx: Any) -> None:
    """Starts a process in a session of its own, which no signal to a group reaches."""
    import subprocess

    child = subprocess.Popen(
        [sys.executable, "-c", f"import time; time.sleep(1000) # {ctx.folder}"], start_new_session=True
    )
    ctx.log(child=child.pid)
    time.sleep(1000)


def prints_a_lot(ctx: Any) -> None:
    """5 MB without a newline, colours and bytes that are no UTF-8."""
    sys.stdout.write("y" * 5_000_000)
    sys.stdout.flush()
    os.write(1, b"\xff\xfe\x1b[31mred\x1b[0m the end")


class Prints:
    """``num_bytes`` without a newline, then as :func:`prints_a_lot`."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def __call__(self, ctx: Any) -> None:
        for _ in range(self.num_bytes // 1_000_000):
            sys.stdout.write("y" * 1_000_000)
        prints_a_lot(ctx)


def fill(path: Any) -> None:
    """Write to ``path`` until its disk is full to the last page."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass


def fills_its_disk(ctx: Any) -> None:
    """Rank 0 fills the disk that the run is on; both log on, and one that frees it logs once more."""
    ctx.log(loss=1.0)
    ctx.barrier()
    filler = ctx.folder.parent / "filler"
    if ctx.rank == 0:
        fill(filler)
    ctx.barrier()
    for _ in range(2000):  # Past what is left of the last page of each file.
        ctx.log(loss=2.0)
    ctx.barrier()
    if ctx.rank == 0:
        filler.write_bytes(b"")
    ctx.barrier()
    ctx.log(loss=3.0)


def leaves_no_room(ctx: Any) -> None:
    """Rank 0 fills the disk for good; both print more than any page had left, and return."""
    ctx.barrier()
    if ctx.rank == 0:
        fill(ctx.folder.parent / "filler")
    ctx.barrier()
    for _ in range(200):
        print("x" * 100, flush=True)
    ctx.log(loss=1.0)


def raises_without_room(ctx: Any) -> None:
    """Fill the disk as the task above, and raise an exception in the end."""
    leaves_no_room(ctx)
    raise ValueError("nobody reads this")


def profiles(ctx: Any) -> None:
    """Records one block as a whole, then a schedule of steps."""
    import torch

    with ctx.profile():
        torch.ones(64, 64) @ torch.ones(64, 64)
    ctx.log(whole=(ctx.folder / "traces" / f"rank-{ctx.rank}.json.gz").stat().st_size)
    with ctx.profile(steps=2, warmup=1, skip=1) as profile:
        for _ in range(6):
            with torch.profiler.record_function("my step"):
                torch.ones(64, 64) @ torch.ones(64, 64)
            profile.step()


def reads_stop_and_commands(ctx: Any) -> None:
    """Collective steps that each read ``should_stop`` and ``commands()``."""
    import torch
    import torch.distributed as dist

    while not ctx.should_stop:
        with torch.profiler.record_function("my step"):
            dist.all_reduce(torch.ones(8))
        for command in ctx.commands():
            ctx.log(command=command["command"])
        ctx.log(loss=1.0)


def reads_commands_only(ctx: Any) -> None:
    """Collective steps of a task that never reads ``should_stop``."""
    import torch
    import torch.distributed as dist

    while True:
        dist.all_reduce(torch.ones(8))
        ctx.commands()
        ctx.log(loss=1.0)


def accelerator(ctx: Any) -> None:
    """Accelerate finds the process group that is up."""
    from accelerate import Accelerator

    state = Accelerator()
    ctx.log(num_processes=state.num_processes, device=str(state.device), index=state.process_index)


class LateToJoin:
    """Tells when each rank was through ``init_process_group`` and when it began; rank 1 is late."""

    preload: ClassVar[tuple[str, ...]] = ("late_rank",)

    def __call__(self, ctx: Any) -> None:
        import late_rank

        ctx.log(joined=late_rank.JOINED, begun=time.monotonic())


def deletes_its_folder(ctx: Any) -> None:
    """The folder vanishes under the run."""
    import shutil

    ctx.log(begun=True)
    ctx.barrier()
    time.sleep(1)  # Until the supervisor has written that the ranks are up: it would make a file anew.
    if ctx.rank == 0:
        shutil.rmtree(ctx.folder)
    for _ in range(1000):
        ctx.log(loss=1.0)
        time.sleep(0.1)


def own_loop() -> None:
    """A person's own script, which knows nothing of a ctx."""
    print("my own loop")
    time.sleep(1000)


def fails_across_a_set_clock(ctx: Any) -> None:
    """The clock is set forth and back; rank 1 fails, and after it rank 0, by a clock that was set back."""
    from jumping_clock import set_clock

    def give_up(*_: object) -> None:
        set_clock(-1e7)
        raise ValueError(f"rank 0 last, at {time.time()}")

    signal.signal(signal.SIGTERM, give_up)  # Which elastic sends to rank 0 when rank 1 is gone.
    for offset in (1e7, -1e6, 0.0):
        ctx.barrier()
        if ctx.rank == 0:
            set_clock(offset)
        for _ in range(5):
            ctx.log(offset=offset)
            time.sleep(0.05)
    ctx.barrier()
    if ctx.rank == 1:
        raise LookupError(f"rank 1 first, at {time.time()}")
    time.sleep(100)


def takes_all_memory(ctx: Any) -> None:
    """Rank 1 takes 64 MiB ten times a second, up to 8 GiB; rank 0 waits for it."""
    held = []
    if ctx.rank == 1:
        print("rank 1 takes all there is", flush=True)
        for _ in range(128):
            # Zeros would be pages that nobody has written to yet.
            held.append(b"x" * 2**26)
            time.sleep(0.1)
    ctx.barrier()


class Sums:
    """Sums over the ranks at each step until asked to stop."""

    def __call__(self, ctx: Any) -> None:
        import torch
        import torch.distributed as dist

        while not ctx.should_stop:
            total = torch.ones(1)
            dist.all_reduce(total)
            ctx.log(total=total)
            time.sleep(0.05)


def makes_its_group_anew(ctx: Any) -> None:
    """Ends its group and makes two others one after the other, as a user's own script may."""
    import torch
    import torch.distributed as dist

    for _ in range(2):
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        total = torch.ones(1) * ctx.rank
        dist.all_reduce(total)
        ctx.log(total=total)


def floods(ctx: Any) -> None:
    """Logs as fast as it can."""
    metrics = {f"m{number}": 1.0 for number in range(40)}
    while True:
        ctx.log(**metrics)


def sets_a_secret(ctx: Any) -> None:
    """Puts a token into the environment, and lets it out in every way."""
    token = " ".join(["fetched", "in", "mid", "run"])
    os.environ["SERVICE_TOKEN"] = token
    print(f"the token is {token}", flush=True)
    ctx.log(**{f"loss/{token}": 1.0, "text": token})
    ctx.record("engine", {token: token})
    del os.environ["SERVICE_TOKEN"]
    time.sleep(1.5)
    os.write(2, f"once more: {token}\n".encode())
    ctx.barrier()
    raise LookupError(f"the service refused {token}")
