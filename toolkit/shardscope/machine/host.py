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


def multiplies_in_fp16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Whether this processor has products in fp16, as oneDNN asks; None where that is not known.

    On x86 AVX512-FP16, or AVX-NE-CONVERT beside AVX2 (oneDNN's ``avx512_core_fp16`` and ``avx2_vnni_2``).
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:  # not Linux
        return None
    flags = next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), None)
    return None if flags is None else not flags.isdisjoint(("avx512_fp16", "avx_ne_convert"))


def memory_groups(membership: Path = Path("/proc/self/cgroup"), root: Path = CGROUP_ROOT) -> Iterator[Path]:
    """Folders of the memory cgroups above this process, its own first; they need not exist.

    In a container the path of its own group may be another outside: then the last of them, the root, is ours.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:  # version 2: one tree
            base = root
        elif "memory" in controllers.split(","):
            base = root / "memory"
        else:
            continue
        folder = base / path.lstrip("/")
        yield from (place for place in (folder, *folder.parents) if place == base or base in place.parents)


def _cgroup_limits(membership: Path, root: Path) -> Iterator[MemoryLimit]:
    """A limit binds everything below it."""
    for folder in memory_groups(membership, root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            yield from _limit(folder / name)


def _limit(file: Path) -> Iterator[MemoryLimit]:
    try:
        value = int(file.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return
    if value > 0:
        yield MemoryLimit(value, file.parent)
