"""Plans to launch and processes to look for, for every launch test."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from shardscope import Architecture, Cluster, Layout, Plan, Recipe


def make_plan(ranks: int = 2, cluster: str = "") -> Plan:
    """A tiny plan for that many CPU ranks here, or for ``cluster``."""
    recipe = Recipe(seq_len=64, global_batch_size=ranks)
    return Plan(Architecture.of_size("2m"), Cluster.parse(cluster or f"{ranks}xcpu"), recipe, Layout.ddp())


def list_processes(folder: Path) -> list[psutil.Process]:
    """Every process of the runs below ``folder``: supervisor, launcher, ranks and what they started."""
    results = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and str(folder) in " ".join(process.cmdline()):
                results.append(process)
        except psutil.Error:
            continue
    return results


def seconds_until(condition: Callable[[], Any], timeout: float = 120.0) -> float:
    """Wait for ``condition``; how long it took. Fails if it does not come true."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout, f"not true within {timeout} s"
        time.sleep(0.02)
    return time.monotonic() - start
