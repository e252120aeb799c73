"""Free memory of this machine's GPUs (or of the host, without GPUs), and the processes that use the rest."""

from __future__ import annotations

import getpass
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.number_format import format_gib
from shardscope.machine.detection import read_gpu_states
from shardscope.records.folder import FINAL, RunFolder
from shardscope.records.json_files import read_json
from shardscope.runs import runs
from shardscope.runs.run import Run
from shardscope.runs.watch.host_monitor import read_free_host_memory

if TYPE_CHECKING:
    from shardscope.machine.detection import GpuState

MAX_USERS = 4
"""Maximum number of users listed by name; the rest are only counted."""


@dataclass(frozen=True, kw_only=True)
class FreeMemory:
    """Free and used memory of one GPU, or of the host."""

    name: str
    """"GPU 0" (driver index) or "host memory"."""
    free_bytes: int
    total_bytes: int
    users: tuple[str, ...] = ()
    """Descriptions of the processes that use it, largest first; empty if there are none or it is unknown."""


def read_free_memory(folder: str | Path = "runs") -> list[FreeMemory]:
    """Return the free memory of each GPU visible to this process, or of the host if there is no GPU.

    The numbers come from NVML, without creating a CUDA context. Processes that are ranks of a run in
    ``folder`` are described by the run's name.
    """
    alive = [run for run in runs(folder) if run.is_on_this_machine and run.status not in FINAL]
    # The host's memory is what counts for CPU ranks, so it is shown only on a machine without GPUs.
    gpus = read_gpu_states()
    if gpus:
        ranks = dict(_find_ranks(alive))
        return [_describe_gpu(gpu, ranks) for gpu in gpus]
    free, total = read_free_host_memory()
    users = tuple(f"the run {run.name} is {run.status}" for run in alive if not run.gpus)
    return [FreeMemory(name="host memory", free_bytes=free, total_bytes=total, users=_shorten(users))]


def _describe_gpu(gpu: GpuState, ranks: dict[int, str]) -> FreeMemory:
    users = sorted(gpu.processes, key=lambda user: -(user[1] or 0))
    descriptions = tuple(
        (ranks.get(pid) or _describe_process(pid))
        + ("" if num_bytes is None else f", {format_gib(num_bytes)} GiB")
        for pid, num_bytes in users
    )
    return FreeMemory(
        name=f"GPU {gpu.index}",
        free_bytes=gpu.free_bytes,
        total_bytes=gpu.total_bytes,
        users=_shorten(descriptions),
    )


def _shorten(users: tuple[str, ...]) -> tuple[str, ...]:
    num_left_out = len(users) - MAX_USERS
    return users if num_left_out <= 0 else (*users[:MAX_USERS], f"{num_left_out} more")


def _find_ranks(alive: Iterable[Run]) -> Iterable[tuple[int, str]]:
    for run in alive:
        for rank in range(run.world_size):
            pid = (read_json(RunFolder(run.folder).rank(rank)) or {}).get("pid")
            if isinstance(pid, int):
                yield pid, f"rank {rank} of the run {run.name}"


def _describe_process(pid: int) -> str:
    """Describe a process by name and user; by pid alone if it is not visible (in another container)."""
    import psutil

    try:
        process = psutil.Process(pid)
        name, user = process.name(), process.username()
        mine = user == getpass.getuser()
    except (psutil.Error, OSError, KeyError):
        return f"process {pid}"
    return f"{name} (process {pid}{'' if mine else f' of {user}'})"
