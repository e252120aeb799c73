"""A memory cgroup with a limit of its own, for as long as a test needs the kernel to run out of memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardscope.machine.host import list_memory_cgroups

LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Of version 2 and of version 1."""
SWAP_LIMITS = ("memory.swap.max", "memory.memsw.limit_in_bytes")
WHY = "needs a memory cgroup of its own, which only root may make, and few containers let it"


@contextlib.contextmanager
def limited_memory(num_bytes: int) -> Iterator[Path]:
    """The file to which a process writes its pid to be in the group. Skips where none can be made."""
    groups = reversed(list(list_memory_cgroups()))
    root = next((group for group in groups if (group / "cgroup.procs").exists()), None)
    if root is None or not os.access(root, os.W_OK):
        pytest.skip(f"{WHY}; run it as root on a machine or in a privileged container")
    group = root / f"shardscope-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as refused:
        pytest.skip(f"{WHY}; run it as root on a machine or in a privileged container ({refused})")
    try:
        limit = next((group / name for name in LIMITS if (group / name).exists()), None)
        if limit is None:
            pytest.skip(f"{WHY}; set +memory in {root}/cgroup.subtree_control")
        limit.write_text(str(num_bytes))
        for name in SWAP_LIMITS:
            if (group / name).exists():
                # What went to swap would not run out.
                (group / name).write_text("0" if "swap" in name else str(num_bytes))
        yield group / "cgroup.procs"
    finally:
        deadline = time.monotonic() + 10
        while True:
            try:
                group.rmdir()
                break
            except OSError:  # Somebody is still in it.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
