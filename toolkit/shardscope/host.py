"""What this machine gives a process: memory and cores, with the container's limits where they are lower."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")


class MemoryLimit(NamedTuple):
    """Of one cgroup."""

    num_bytes: int
    folder: Path
    """Where what it holds is counted as well."""


def host_memory_bytes(membership: Path = Path("/proc/self/cgroup"), root: Path = CGROUP_ROOT) -> int:
    """Bytes of memory that this process may use: the machine's, or the lowest cgroup limit above it."""
    total, limit = int(psutil.virtual_memory().total), memory_limit(membership, root)
    return total if limit is None else min(total, limit.num_bytes)


def memory_limit(
    membership: Path = Path("/proc/self/cgroup"), root: Path = CGROUP_ROOT
) -> MemoryLimit | None:
    """The lowest cgroup limit above this process; None where there is none."""
    return min(_cgroup_limits(membership, root), key=lambda limit: limit.num_bytes, default=None)


def host_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cgroup_limits(membership: Path, root: Path) -> Iterator[MemoryLimit]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:  # version 2: one tree
            base, file = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A limit binds everything below it. In a container the path may not exist: then the root is ours.
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place != base and base not in place.parents:
                break
            yield from _limit(place / file)


def _limit(file: Path) -> Iterator[MemoryLimit]:
    try:
        value = int(file.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return
    if value > 0:
        yield MemoryLimit(value, file.parent)
