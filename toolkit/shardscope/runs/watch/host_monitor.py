"""What ranks had of the host's memory just before one of them was killed: SIGKILL leaves no last word."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from shardscope.core.number_format import gib
from shardscope.machine.host import memory_limit
from shardscope.records.files import read_json
from shardscope.records.folder import RunFolder
from shardscope.runs.explain.oom_kills import OomKills, count_oom_kills, sender_in_words


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One look at one rank."""

    rank_bytes: int
    """Resident memory of the rank's own process."""
    free_bytes: int
    total_bytes: int

    @property
    def is_full(self) -> bool:
        """Whether so little was free that it may have been gone a second later."""
        return self.free_bytes <= self.total_bytes // 4


class HostWatch:
    """One run's; ``look`` once a second, ``words`` for a rank that was killed."""

    def __init__(self, folder: RunFolder, world_size: int) -> None:
        self.folder = folder
        self.pids: dict[int, int | None] = dict.fromkeys(range(world_size))
        self.seen: dict[int, Seen] = {}
        self._kills_before = count_oom_kills()

    def look(self) -> None:
        """Keep what each living rank holds now, and what the host has left. Raises ``OSError``."""
        free, total = free_host_memory()
        for rank in self.pids:
            if self.pids[rank] is None:
                self.pids[rank] = (read_json(self.folder.rank(rank)) or {}).get("pid")
            pid = self.pids[rank]
            if isinstance(pid, int) and (held := resident_bytes(pid)):
                self.seen[rank] = Seen(rank_bytes=held, free_bytes=free, total_bytes=total)

    def words(self, rank: int | None) -> str:
        """Who sent the SIGKILL that ended ``rank`` (None: the launcher), as far as is known, and numbers."""
        seen = None if rank is None else self.seen.get(rank)
        told = [sender_in_words(self._oom_kills(), is_full=seen is not None and seen.is_full)]
        if seen is not None:
            held, free, total = map(gib, (seen.rank_bytes, seen.free_bytes, seen.total_bytes))
            told.append(f"it was last seen with {held} GiB, {free} free of {total}")
        return "; ".join(told)

    def ran_out(self, rank: int) -> bool:
        """Whether host memory may be why ``rank`` was killed, by the kernel or a daemon that was quicker."""
        seen = self.seen.get(rank)
        return self._oom_kills().struck is True or (seen is not None and seen.is_full)

    def _oom_kills(self) -> OomKills:
        return count_oom_kills().since(self._kills_before)


def free_host_memory() -> tuple[int, int]:
    """Bytes that are free on this host, and in all: the container's, where those are fewer."""
    import psutil

    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    limit = memory_limit()
    if limit is not None and limit.num_bytes < total:  # The machine's own numbers know nothing of it.
        total = limit.num_bytes
        free = min(free, max(0, total - used_bytes(limit.folder)))
    return free, total


def used_bytes(folder: Path) -> int:
    """What the cgroup in ``folder`` holds that cannot be given back; 0 where nothing tells.

    Pages of files can, as the kernel counts them for a whole machine (MemAvailable).
    """
    for used, prefix in (("memory.current", ""), ("memory.usage_in_bytes", "total_")):
        try:
            held = int((folder / used).read_text())
            stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
            files = sum(int(stat.get(f"{prefix}{which}_file", 0)) for which in ("inactive", "active"))
        except (OSError, ValueError):
            continue
        return max(0, held - files)
    return 0


def resident_bytes(pid: int) -> int:
    """Resident memory of one process; 0 if it is gone, or the system has no /proc."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
