"""The lease: a pipe whose write end only the kernel holds. When the kernel dies, in whatever way, it closes.

Leases live in this module and not in a ``Run``: a handle that is garbage-collected must not end its run. The
thread that holds one outlives the supervisor, and so tidies up after one that was killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass, field

from shardscope.machine.processes import end_session, ended_well, move_past_standard_streams, start_of
from shardscope.records.files import delete_halves, read_lines
from shardscope.records.folder import FINAL, RunFolder
from shardscope.records.redaction import LogCleaner

TIDY_SECONDS = 5.0
"""How long a killed supervisor's ranks, which die with it, may still be in their temporary folder."""

DESCRIPTOR_SECONDS = 600.0
"""How long to wait for a free descriptor before tidying up without one, which does little."""
STOP_SECONDS = 10.0
"""How long a supervisor that is stopped at once may take; it needs less than one second."""


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
    """Keep the lease until the supervisor ends, and reap it then, so that it leaves no zombie.

    Raises ``OSError`` where no thread can be started; the supervisor is stopped, and the lease closed, then.
    """

    def wait() -> None:
        well = ended_well(supervisor.pid)
        _wait_for_descriptor()
        if well is None:
            well = _has_final_status(folder)
        if not well:
            _end_session_of_ended(supervisor.pid)
        supervisor.wait()
        if write_end is not None:
            release(write_end)
        if not well:
            tidy(folder)

    thread = threading.Thread(target=wait, name=f"shardscope-lease-{supervisor.pid}", daemon=True)
    try:
        thread.start()
    except BaseException as error:
        stop_supervisor(supervisor)
        if write_end is not None:
            release(write_end)
        if isinstance(error, RuntimeError):  # "can't start new thread", which tells no more.
            raise OSError(errno.EAGAIN, "no thread can be started") from error
        raise


def stop_supervisor(supervisor: subprocess.Popen[bytes]) -> None:
    """Have the supervisor end its run, and kill both if it does not; harmless when it has ended."""
    supervisor.terminate()
    try:
        supervisor.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        _end_session_of_ended(supervisor.pid)
        supervisor.wait()


def _end_session_of_ended(pid: int) -> None:
    """Kill what ranks had started, which is in the session of their supervisor; ranks die with it."""
    with contextlib.suppress(OSError):
        # A process that has its number by now is another one, with a session of its own.
        if start_of(pid) is None:
            end_session(pid)


def _wait_for_descriptor() -> None:
    """Wait until this process can open a file again: tidying up needs some."""
    deadline = time.monotonic() + DESCRIPTOR_SECONDS
    while time.monotonic() < deadline:
        try:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            return
        except OSError:
            time.sleep(0.2)


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
