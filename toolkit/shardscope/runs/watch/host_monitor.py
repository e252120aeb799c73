"""Host memory of each rank, sampled so that a later SIGKILL (which leaves no traceback) can be explained."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from shardscope.core.number_format import format_gib
from shardscope.machine.host import find_memory_limit
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import read_json
from shardscope.runs.explain.oom_kills import OomKills, describe_kill_sender, read_oom_kills


@dataclass(frozen=True, kw_only=True)
class HostSample:
    """One sample of one rank."""

    rank_bytes: int
    """Resident memory of the rank's own process."""
    free_bytes: int
    total_bytes: int

    @property
    def is_full(self) -> bool:
        """Return whether at most a quarter was free, so that it may have run out before the next sample."""
        return self.free_bytes <= self.total_bytes // 4


class HostMemoryMonitor:
    """Host memory sampler of one run: call ``sample`` once a second, ``describe_kill`` for a killed rank."""

    def __init__(self, folder: RunFolder, world_size: int) -> None:
        self.folder = folder
        self.pids: dict[int, int | None] = dict.fromkeys(folder.select_ranks(world_size))
        self.seen: dict[int, HostSample] = {}
        self._kills_before = read_oom_kills()

    def sample(self) -> None:
        """Sample the resident memory of each live rank and the host's free memory. Raises ``OSError``."""
        # A killed rank leaves nothing to read, so keep its last sample.
        free, total = read_free_host_memory()
        for rank in self.pids:
            if self.pids[rank] is None:
                stored = (read_json(self.folder.rank(rank)) or {}).get("pid")
                self.pids[rank] = stored if isinstance(stored, int) else None
            pid = self.pids[rank]
            if isinstance(pid, int) and (num_bytes := read_resident_bytes(pid)):
                self.seen[rank] = HostSample(rank_bytes=num_bytes, free_bytes=free, total_bytes=total)

    def describe_kill(self, rank: int | None) -> str:
        """Return the likely sender of the SIGKILL that ended ``rank`` (None: the launcher) and its memory."""
        seen = None if rank is None else self.seen.get(rank)
        clauses = [describe_kill_sender(self._oom_kills(), is_full=seen is not None and seen.is_full)]
        if seen is not None:
            used, free, total = map(format_gib, (seen.rank_bytes, seen.free_bytes, seen.total_bytes))
            clauses.append(f"it last used {used} GiB, with {free} of {total} GiB free")
        return "; ".join(clauses)

    def may_have_run_out(self, rank: int) -> bool:
        """Return whether ``rank`` may have been killed for lack of host memory, by the kernel or a daemon."""
        seen = self.seen.get(rank)
        return self._oom_kills().any_kill is True or (seen is not None and seen.is_full)

    def _oom_kills(self) -> OomKills:
        return read_oom_kills().subtract(self._kills_before)


def read_free_host_memory() -> tuple[int, int]:
    """Return free and total bytes of the host, or of the container if its limit is lower."""
    import psutil

    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    limit = find_memory_limit()
    if limit is not None and limit.num_bytes < total:  # psutil ignores cgroup limits.
        total = limit.num_bytes
        free = min(free, max(0, total - read_used_bytes(limit.folder)))
    return free, total


def read_used_bytes(folder: Path) -> int:
    """Return the bytes of the cgroup in ``folder`` that cannot be reclaimed; 0 if unknown.

    Page cache can be reclaimed; the kernel's MemAvailable makes the same distinction for a whole machine.
    """
    # File and key names of cgroup version 2, then version 1, whose total_ counters include child groups.
    for used, prefix in (("memory.current", ""), ("memory.usage_in_bytes", "total_")):
        try:
            num_bytes = int((folder / used).read_text())
            stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
            files = sum(int(stat.get(f"{prefix}{which}_file", 0)) for which in ("inactive", "active"))
        except (OSError, ValueError):
            continue
        return max(0, num_bytes - files)
    return 0


def read_resident_bytes(pid: int) -> int:
    """Return the resident bytes of one process; 0 if it is gone or the system has no /proc."""
    try:
        # proc(5): the second number is the resident set, in pages.
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
