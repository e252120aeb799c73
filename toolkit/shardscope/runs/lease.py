"""The lease: a pipe whose write end only the kernel holds. When the kernel dies, in whatever way, it closes.

Leases live in this module and not in a ``Run``: a handle that is garbage-collected must not end its run. The
thread that holds one outlives the supervisor, and so tidies up after one that was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass, field

from shardscope.runs.folder import FINAL, RunFolder
from shardscope.runs.processes import end_session, ended_well, move_past_standard_streams, start_of
from shardscope.runs.records import delete_halves, read_lines
from shardscope.runs.redaction import LogCleaner

TIDY_SECONDS = 5.0
"""How long a killed supervisor's ranks, which die with it, may still be in their temporary folder."""


@dataclass
class _Held:
    """Write ends that this process holds open, and the lock that guards them."""

    write_ends: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


_held = _Held()


def open_lease() -> tuple[int, int]:
    """A new pipe as (read end for the supervisor, write end kept here). Neither is inheritable.

    Neither is 0, 1 or 2, even where the kernel has closed these: the supervisor has other files there, and
    what the kernel's native libraries print would go into the pipe.
    """
    with _held.lock:
        read_end, write_end = (move_past_standard_streams(end) for end in os.pipe())
        _held.write_ends.add(write_end)
    return read_end, write_end


def release(write_end: int) -> None:
    """Close a write end; harmless when it is closed already."""
    with _held.lock:
        if write_end in _held.write_ends:
            _held.write_ends.discard(write_end)
            os.close(write_end)


def hold_until_end(supervisor: subprocess.Popen[bytes], write_end: int | None, folder: RunFolder) -> None:
    """Keep the lease until the supervisor ends, and reap it then, so that it leaves no zombie."""

    def wait() -> None:
        well = ended_well(supervisor.pid)
        if well is None:
            well = _has_final_status(folder)
        # A process that has its number by now is another one, with a session of its own.
        if (
            not well and start_of(supervisor.pid) is None
        ):  # What ranks had started is in its session, and ranks themselves die with it.
            end_session(supervisor.pid)
        supervisor.wait()
        if write_end is not None:
            release(write_end)
        if not well:
            tidy(folder)

    threading.Thread(target=wait, name=f"shardscope-lease-{supervisor.pid}", daemon=True).start()


def _has_final_status(folder: RunFolder) -> bool:
    return any(record.get("status") in FINAL for record in read_lines(folder.status))


def tidy(folder: RunFolder) -> None:
    """What a supervisor does at its end: delete task and temporary files, take secrets out of logs."""
    deadline = time.monotonic() + TIDY_SECONDS
    while folder.temporary.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder.temporary, ignore_errors=True)
        time.sleep(0.02)
    with contextlib.suppress(OSError):
        folder.task.unlink(missing_ok=True)
        delete_halves(folder.path)
    for log in (*folder.path.glob("*.log"), *folder.launcher_log.parent.glob("*.log")):
        with contextlib.suppress(OSError):
            for _ in LogCleaner(log).finish():
                pass


def _before_fork() -> None:
    _held.lock.acquire()


def _after_fork() -> None:
    _held.lock.release()


def _forget_after_fork() -> None:
    # os.fork() copies even non-inheritable descriptors: a DataLoader worker of the kernel would keep
    # every run alive after the kernel.
    global _held
    for write_end in _held.write_ends:
        with contextlib.suppress(OSError):
            os.close(write_end)
    _held = _Held()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork,
        after_in_child=_forget_after_fork,
    )
