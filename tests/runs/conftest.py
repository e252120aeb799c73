"""Launch tests use ``bounded_time`` and ``nothing_left``.

The latter: no child process left, the port free, and the run's folder says what happened.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_helpers import list_processes, make_plan

from shardscope.records.folder import FINAL
from shardscope.runs.run import Run

SECONDS_PER_TEST = 300


@pytest.fixture
def plan() -> Any:
    return make_plan(2)


@pytest.fixture
def bounded_time() -> Iterator[None]:
    def too_long(*_: object) -> None:
        raise TimeoutError(f"the test took more than {SECONDS_PER_TEST} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS_PER_TEST)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def list_files(folder: Path, pattern: str) -> list[Path]:
    """Those below ``folder``, of which somebody may be removing a part meanwhile: rglob would raise."""
    return [
        Path(place, name) for place, _, names in os.walk(folder) for name in fnmatch.filter(names, pattern)
    ]


def find_own_users(port: int) -> list[psutil.Process]:
    """Return children of this process, and orphans, that have a socket at ``port``.

    A run's port is only a value, at which nothing listens: since it was chosen, the system may have given it
    to any other process, such as the browser or the kernel of another test.
    """
    users = []
    with contextlib.suppress(psutil.AccessDenied):
        sockets = [each for each in psutil.net_connections("inet") if each.laddr and each.laddr.port == port]
        for pid in {each.pid for each in sockets if each.pid is not None}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.ppid() == 1 or os.getpid() in [parent.pid for parent in process.parents()]:
                    users.append(process)
    return users


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    # A supervisor whose run has ended still looks for secrets in what was printed: of 100 MB, for seconds.
    deadline = time.monotonic() + 60
    while (left := list_processes(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        process.kill()
    assert not left, f"processes left: {left}"
    for file in list_files(tmp_path, "rank-*.json"):
        if file.parent.name != "ranks":
            continue
        port = int(json.loads(file.read_text())["port"])
        assert not (users := find_own_users(port)), f"port {port} is taken by {users}"
    assert not list_files(tmp_path, "task.pkl"), "a task was left on disk"
    for file in list_files(tmp_path, "supervisor.log"):
        run = Run.attach(file.parent)
        assert run.status in FINAL and run.reason, f"{run} does not say how it ended"
