"""What is free on this machine at this moment, and who has the rest: its cards, or the host's memory."""

from __future__ import annotations

import getpass
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.number_format import gib
from shardscope.machine.detection import gpus_now
from shardscope.records.files import read_json
from shardscope.records.folder import FINAL, RunFolder
from shardscope.runs.run import Run, runs
from shardscope.runs.watch.host_monitor import free_host_memory

if TYPE_CHECKING:
    from shardscope.machine.detection import GpuNow

MAX_USERS = 4
"""Told one by one; more are counted."""


@dataclass(frozen=True, kw_only=True)
class FreeNow:
    """One card, or the memory of the host."""

    name: str
    """"GPU 0", as the driver counts them, or "host memory"."""
    free_bytes: int
    total_bytes: int
    users: tuple[str, ...] = ()
    """Who is on it, in words, those first that hold most; empty where nobody is, or nothing tells."""


def free_now(folder: str | Path = "runs") -> list[FreeNow]:
    """The cards that CUDA would see in this process; the host's memory where there is none.

    The driver's library is asked, and no CUDA context made. ``folder`` has the runs that are called by their
    names among those who are there.
    """
    alive = [run for run in runs(folder) if run.is_here and run.status not in FINAL]
    cards = gpus_now()
    if cards:
        ranks = dict(_ranks_of(alive))
        return [_card(card, ranks) for card in cards]
    free, total = free_host_memory()
    users = tuple(f"the run {run.name} is {run.status}" for run in alive if not run.gpus)
    return [FreeNow(name="host memory", free_bytes=free, total_bytes=total, users=_few(users))]


def _card(card: GpuNow, ranks: dict[int, str]) -> FreeNow:
    users = sorted(card.processes, key=lambda user: -(user[1] or 0))
    told = tuple(
        f"{ranks.get(pid) or _process(pid)}{'' if held is None else f', {gib(held)} GiB'}"
        for pid, held in users
    )
    return FreeNow(
        name=f"GPU {card.index}",
        free_bytes=card.free_bytes,
        total_bytes=card.total_bytes,
        users=_few(told),
    )


def _few(users: tuple[str, ...]) -> tuple[str, ...]:
    more = len(users) - MAX_USERS
    return users if more <= 0 else (*users[:MAX_USERS], f"{more} more")


def _ranks_of(alive: Iterable[Run]) -> Iterable[tuple[int, str]]:
    for run in alive:
        for rank in range(run.world_size):
            pid = (read_json(RunFolder(run.folder).rank(rank)) or {}).get("pid")
            if isinstance(pid, int):
                yield pid, f"rank {rank} of the run {run.name}"


def _process(pid: int) -> str:
    """Whose it is and what it is called; its number alone where another container's is not to be seen."""
    import psutil

    try:
        process = psutil.Process(pid)
        name, user = process.name(), process.username()
        mine = user == getpass.getuser()
    except (psutil.Error, OSError, KeyError):
        return f"process {pid}"
    return f"{name} (process {pid}{'' if mine else f' of {user}'})"
