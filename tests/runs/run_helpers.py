"""Plans to launch and processes to look for, for every launch test."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil


class StandInPlan:
    """What ``launch`` uses of a plan, until there are plans."""

    def __init__(self, ranks: int, gpu: str = "cpu", nodes: int = 1) -> None:
        self.world_size = ranks * nodes
        self.cluster = SimpleNamespace(gpu=SimpleNamespace(name=gpu), gpus_per_node=ranks, num_nodes=nodes)
        self.layout = SimpleNamespace(framework="ddp")

    def to_json(self) -> str:
        return json.dumps({"stand_in": self.world_size})


def make_plan(ranks: int = 2) -> Any:
    """A tiny plan for that many CPU ranks here."""
    try:
        from shardscope import Architecture, Cluster, Layout, Plan, Recipe
    except ImportError:
        return StandInPlan(ranks)
    cluster = Cluster.parse(f"{ranks}xcpu")
    return Plan(
        Architecture.of_size("2m"), cluster, Recipe(seq_len=64, global_batch_size=ranks), Layout.ddp()
    )


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every process of the runs below ``folder``: supervisor, launcher, ranks and what they started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and str(folder) in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def seconds_until(condition: Callable[[], Any], timeout: float = 60.0) -> float:
    """Wait for ``condition``; how long it took. Fails if it does not come true."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout, f"not true within {timeout} s"
        time.sleep(0.02)
    return time.monotonic() - start
