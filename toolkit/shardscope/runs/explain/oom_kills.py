"""Counters of the Linux out-of-memory killer, to explain a SIGKILL (a signal does not name its sender)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shardscope.machine.host import CGROUP_ROOT, list_memory_cgroups

GROUP_FILES = ("memory.events", "memory.oom_control")
"""Counter files of cgroup version 2 (Documentation/admin-guide/cgroup-v2.rst: processes of this group and its
descendants killed by *any* OOM killer, whichever limit was hit) and of version 1, which counts the same."""
MACHINE_FILE = Path("/proc/vmstat")


class OomKills(NamedTuple):
    """Number of OOM kills since boot, or between two counts. None where there is no counter."""

    group: int | None
    """Kills in this process's memory cgroup, which contains its child processes."""
    machine: int | None

    def subtract(self, before: OomKills) -> OomKills:
        """Return the difference from an earlier count."""
        pairs = zip(self, before, strict=True)
        return OomKills(*(None if now is None or then is None else now - then for now, then in pairs))

    @property
    def any_kill(self) -> bool | None:
        """Return whether there was a kill in this cgroup, or on this machine if no group counts.

        None if unknown.
        """
        number = self.machine if self.group is None else self.group
        return None if number is None else number > 0


def read_oom_kills(
    membership: Path = Path("/proc/self/cgroup"),
    root: Path = CGROUP_ROOT,
    machine: Path = MACHINE_FILE,
) -> OomKills:
    """Read the current counters."""
    in_group = (folder / name for folder in list_memory_cgroups(membership, root) for name in GROUP_FILES)
    return OomKills(_read_first_counter(in_group), _read_first_counter([machine]))


def describe_kill_sender(kills: OomKills, *, is_full: bool) -> str:
    """Describe the likely sender of a SIGKILL.

    ``kills`` is the change of the counters since the start of the run; ``is_full`` whether little memory was
    free just before the signal.
    """
    # First the kernel's own counters, then how full memory was: a daemon such as systemd-oomd sends SIGKILL
    # before the kernel must, and is not counted.
    if kills.any_kill:
        number, where = kills.group, "in this memory group"
        if number is None:
            number, where = kills.machine, "on this machine"
        times = "once" if number == 1 else f"{number} times"
        return f"host memory ran out: the kernel's out-of-memory killer struck {times} {where} during the run"
    if kills.any_kill is None:
        unknown = "this system does not count out-of-memory kills"
        if is_full:
            return f"{unknown}; the kernel most likely sent it, because little memory was free"
        return f"{unknown}; the kernel or another process sent it"
    still = "the kernel counted no out-of-memory kill"
    if kills.machine:
        still = "the kernel's out-of-memory killer struck elsewhere on this machine, not in this memory group"
    if is_full:
        return f"{still}, but little memory was free: systemd-oomd or another process sent it"
    return f"{still}: another process sent it (kill, a job scheduler), or another memory group's limit did"


def _read_first_counter(files: Iterable[Path]) -> int | None:
    for file in files:
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdecimal():
                return int(value)
    return None
