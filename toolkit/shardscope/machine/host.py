"""Host memory and cores available to this process, container limits included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CGROUP_ROOT = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")


class MemoryLimit(NamedTuple):
    """Memory limit of one cgroup."""

    num_bytes: int
    folder: Path
    """The cgroup's folder, which also has its current usage."""


def get_host_memory_bytes(membership: Path = Path("/proc/self/cgroup"), root: Path = CGROUP_ROOT) -> int:
    """Return the bytes of memory that this process may use: the host's, or the lowest cgroup limit."""
    total, limit = _read_total_memory(), find_memory_limit(membership, root)
    return total if limit is None else min(total, limit.num_bytes)


def _read_total_memory() -> int:
    try:
        import psutil
    except ImportError:  # Pyodide has no psutil, for it has no processes.
        if not hasattr(os, "sysconf"):
            raise ValueError("The memory of this machine is not known: pip install psutil.") from None
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(psutil.virtual_memory().total)


def find_memory_limit(
    membership: Path = Path("/proc/self/cgroup"), root: Path = CGROUP_ROOT
) -> MemoryLimit | None:
    """Return the lowest memory limit of this process's cgroup and its parents; None if there is none."""
    return min(_list_limits(membership, root), key=lambda limit: limit.num_bytes, default=None)


def count_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def multiplies_in_fp16(cpuinfo: Path = CPUINFO) -> bool | None:
    """Return whether oneDNN has fp16 matmuls on this CPU; None if unknown.

    On x86 it needs AVX512-FP16, or AVX-NE-CONVERT with AVX2 (``avx512_core_fp16`` and ``avx2_vnni_2``).
    """
    return _has_any_flag(cpuinfo, "avx512_fp16", "avx_ne_convert")


def multiplies_in_bf16(cpuinfo: Path = CPUINFO) -> bool | None:
    """Return whether this CPU has instructions for bf16 matmuls; None if unknown. Without, each is emulated.

    On x86 they are AVX512-BF16's, AMX's, or those of AVX-NE-CONVERT (oneDNN's ``avx512_core_bf16``).
    """
    return _has_any_flag(cpuinfo, "avx512_bf16", "amx_bf16", "avx_ne_convert")


def _has_any_flag(cpuinfo: Path, *flags: str) -> bool | None:
    """Return whether an x86 CPU has one of these instruction sets; None if that is not known."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:  # not Linux
        return None
    present = next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), None)
    return None if present is None else not present.isdisjoint(flags)


def list_memory_cgroups(
    membership: Path = Path("/proc/self/cgroup"), root: Path = CGROUP_ROOT
) -> Iterator[Path]:
    """Yield the folders of this process's memory cgroup and its parents, innermost first; they may not exist.

    In a container the path of this process's cgroup may be the host's path, which does not exist inside.
    Then the last folder, the root, is the container's.
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
        yield from (group for group in (folder, *folder.parents) if group == base or base in group.parents)


def _list_limits(membership: Path, root: Path) -> Iterator[MemoryLimit]:
    """Yield the limits of this process's cgroup and its parents: each limit applies to all descendants."""
    for folder in list_memory_cgroups(membership, root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            yield from _read_limit(folder / name)


def _read_limit(file: Path) -> Iterator[MemoryLimit]:
    try:
        value = int(file.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return
    if value > 0:
        yield MemoryLimit(value, file.parent)
