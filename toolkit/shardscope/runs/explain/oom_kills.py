"""How often the kernel's out-of-memory killer struck: SIGKILL itself does not say who sent it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shardscope.machine.host import CGROUP_ROOT, memory_groups

GROUP_FILES = ("memory.events", "memory.oom_control")
"""Of cgroup version 2 (Documentation/admin-guide/cgroup-v2.rst: processes of this group and those below it
that *any* out-of-memory killer ended, whosever limit it was) and of version 1, which counts alike."""
MACHINE_FILE = Path("/proc/vmstat")


class OomKills(NamedTuple):
    """Since this machine, or the group, came up; or between two counts. None where nothing counts."""

    group: int | None
    """Of processes in this process's memory cgroup, in which what it starts is as well."""
    machine: int | None

    def since(self, before: OomKills) -> OomKills:
        """This count less an earlier one."""
        pairs = zip(self, before, strict=True)
        return OomKills(*(None if now is None or then is None else now - then for now, then in pairs))

    @property
    def struck(self) -> bool | None:
        """Whether it struck here; on the whole machine where no group counts; None where nothing does."""
        number = self.machine if self.group is None else self.group
        return None if number is None else number > 0


def count_oom_kills(
    membership: Path = Path("/proc/self/cgroup"),
    root: Path = CGROUP_ROOT,
    machine: Path = MACHINE_FILE,
) -> OomKills:
    """The counters as they stand."""
    in_group = (folder / name for folder in memory_groups(membership, root) for name in GROUP_FILES)
    return OomKills(_first(in_group), _first([machine]))


def sender_in_words(kills: OomKills, *, is_full: bool) -> str:
    """Who sent a SIGKILL while the counters moved by ``kills``; ``is_full``: little memory was free then."""
    if kills.struck:
        number, where = kills.group, "in this memory group"
        if number is None:
            number, where = kills.machine, "on this machine"
        times = "once" if number == 1 else f"{number} times"
        return f"host memory ran out, for the kernel's out-of-memory killer struck {times} {where} meanwhile"
    if kills.struck is None:
        unknown = "nothing here counts what the kernel kills for want of memory"
        cause = "little was free: that, most likely" if is_full else "that, or another process sent it"
        return f"{unknown}; {cause}"
    still = "the kernel's out-of-memory counter stood still"
    if kills.machine:
        still = "the kernel's out-of-memory killer struck elsewhere on this machine, not in this memory group"
    if is_full:
        return f"{still}, but little memory was free: systemd-oomd or another process sent it"
    return f"{still}: another process sent it (kill, a job scheduler), or another memory group's limit did"


def _first(files: Iterable[Path]) -> int | None:
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
