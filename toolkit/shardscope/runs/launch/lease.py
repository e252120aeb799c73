"""The lease: a pipe that ends a run with its kernel, whose write end only the kernel holds.

The operating system closes the pipe however the kernel dies. Leases belong to this module and not to a
``Run``: garbage collection of a handle must not end its run. The thread that holds a lease outlives the
supervisor, and so cleans up after one that was killed.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardscope.machine.processes import (
    kill_session,
    move_past_standard_streams,
    read_start_time,
    wait_for_success,
)
from shardscope.machine.python_process import build_module_command
from shardscope.records.attempts import has_final_status
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import delete_partial_files
from shardscope.records.redaction import LogCleaner
from shardscope.records.regular_files import open_to_append
from shardscope.runs.backends.backend import LaunchError

TIDY_SECONDS = 5.0
"""Time that the ranks of a killed supervisor, which die with it, may still write temporary files."""

DESCRIPTOR_SECONDS = 600.0
"""Maximum wait for a free file descriptor before the cleanup, most of which needs one."""
STOP_SECONDS = 10.0
"""Time from SIGTERM to SIGKILL for a supervisor; it normally needs less than one second."""


@dataclass
class _WriteEnds:
    """The write ends that this process holds open, and the lock that guards them."""

    write_ends: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


_leases = _WriteEnds()


def open_lease() -> tuple[int, int]:
    """Create a pipe. Return (read end for the supervisor, write end kept here), neither inheritable.

    Neither is 0, 1 or 2, even if the kernel has closed these: the supervisor has other files there, and
    output of the kernel's native libraries would go into the pipe.
    """
    with _leases.lock:
        read_end, write_end = (move_past_standard_streams(end) for end in os.pipe())
        _leases.write_ends.add(write_end)
    return read_end, write_end


def release_lease(write_end: int) -> None:
    """Close a write end; no effect if it is closed already."""
    with _leases.lock:
        if write_end in _leases.write_ends:
            _leases.write_ends.discard(write_end)
            os.close(write_end)


def start_leased_process(
    module: str, folder: RunFolder, log: Path, environment: Mapping[str, str], *, has_lease: bool
) -> tuple[subprocess.Popen[bytes], int | None]:
    """Start ``python -m module <folder> [read end]``. Return the process and the write end of its lease.

    It is the leader of a session of its own, so that Ctrl-C in the kernel does not reach it. Without
    ``has_lease`` it has no lease, and the write end is None. Raises ``OSError``; no lease stays open then.
    """
    if not sys.executable:
        raise LaunchError(errno.ENOENT, "This Python does not know its own executable (sys.executable).")
    read_end, write_end = open_lease() if has_lease else (None, None)
    inherited = () if read_end is None else (read_end,)
    try:
        with open_to_append(log) as output:
            process = subprocess.Popen(
                build_module_command(module, str(folder.path), *map(str, inherited)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=inherited,
                start_new_session=True,
            )
    except BaseException as error:
        # No process runs, so nothing else closes the lease.
        if write_end is not None:
            release_lease(write_end)
        # subprocess sets `filename` to the program that it could not execute.
        if isinstance(error, OSError) and error.filename == sys.executable:
            raise LaunchError(
                error.errno,
                f"Python cannot be started from {sys.executable}: {error.strerror}. Its environment was "
                "moved, deleted or replaced; restart the kernel from one that exists.",
            ) from error
        raise
    finally:
        # The process has inherited a copy of its own.
        if read_end is not None:
            os.close(read_end)
    return process, write_end


def start_lease_thread(process: subprocess.Popen[bytes], wait: Callable[[], None]) -> None:
    """Call ``wait``, which holds the lease of ``process``, in a thread. Raises ``OSError`` without one."""
    thread = threading.Thread(target=wait, name=f"shardscope-lease-{process.pid}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # "can't start new thread": the process limit is reached.
        raise OSError(errno.EAGAIN, "no thread can be started") from error


def hold_lease(supervisor: subprocess.Popen[bytes], write_end: int | None, folder: RunFolder) -> None:
    """Start a thread that holds the lease until the supervisor ends, then reaps it.

    The thread also cleans up after a supervisor that was killed. Raises ``OSError`` if no thread can be
    started; the supervisor is stopped and the lease closed first.
    """

    if write_end is not None:
        _live_leases[supervisor.pid] = folder

    def wait() -> None:
        ended_normally = wait_for_success(supervisor.pid)
        _live_leases.pop(supervisor.pid, None)
        _wait_for_descriptor()
        # If another thread has reaped the supervisor, its exit code is lost: the status decides.
        if ended_normally is None:
            ended_normally = has_final_status(folder)
        # Before the supervisor is reaped, its process id cannot be reused, and so neither can its session's.
        if not ended_normally:
            _end_session_of_ended(supervisor.pid)
        supervisor.wait()
        if write_end is not None:
            release_lease(write_end)
        # Last, because it may take TIDY_SECONDS: the ranks still end meanwhile.
        if not ended_normally:
            clean_up_killed_run(folder)

    try:
        start_lease_thread(supervisor, wait)
    except BaseException:
        _live_leases.pop(supervisor.pid, None)
        stop_supervisor(supervisor)
        if write_end is not None:
            release_lease(write_end)
        raise


_live_leases: dict[int, RunFolder] = {}
"""The runs that end with this process, by the process id of their supervisor."""


@atexit.register
def _name_ending_runs() -> None:
    """Print which runs this process stops by its end: a script that does not wait would lose them unseen.

    Notebooks need no such line: users end a kernel, and the launch button says what happens then.
    """
    names = [repr(folder.path.name) for folder in list(_live_leases.values()) if not has_final_status(folder)]
    if not names or "ipykernel.kernelapp" in sys.modules:
        return
    print(
        f"shardscope: the end of this process stops run{'s' * (len(names) > 1)} {', '.join(names)}, which it "
        "launched. run.wait() waits for the end of a run; with outlive_kernel=True (`shardscope launch` "
        "without --wait) it goes on.",
        file=sys.stderr,
    )


def stop_supervisor(supervisor: subprocess.Popen[bytes]) -> None:
    """Terminate the supervisor, which ends its run; kill both after ``STOP_SECONDS``."""
    supervisor.terminate()
    try:
        supervisor.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        _end_session_of_ended(supervisor.pid)
        supervisor.wait()


def _end_session_of_ended(pid: int) -> None:
    """Kill the processes that ranks started, by their supervisor's session; the ranks die with it anyway."""
    with contextlib.suppress(OSError):
        # If the pid is alive again, it was reused by another process with its own session.
        if read_start_time(pid) is None:
            kill_session(pid)


def _wait_for_descriptor() -> None:
    """Wait until this process can open a file: the cleanup needs file descriptors."""
    deadline = time.monotonic() + DESCRIPTOR_SECONDS
    while time.monotonic() < deadline:
        try:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            return
        except OSError:
            time.sleep(0.2)


def clean_up_killed_run(folder: RunFolder) -> None:
    """Clean up in place of a killed supervisor: delete task and temporary files, redact secrets in logs."""
    # Ranks that are just being killed may write a file between the listing and the deletion of the folder.
    deadline = time.monotonic() + TIDY_SECONDS
    while folder.temporary.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder.temporary, ignore_errors=True)
        time.sleep(0.02)
    with contextlib.suppress(OSError):
        folder.task.unlink(missing_ok=True)
        delete_partial_files(folder.path)
    for log in (*folder.path.glob("*.log"), *folder.launcher_log.parent.glob("*.log")):
        with contextlib.suppress(OSError):
            for _ in LogCleaner(log).finish():
                pass


def _before_fork() -> None:
    # Without the lock, another thread might open a lease between the fork and the child's list of leases.
    _leases.lock.acquire()


def _after_fork() -> None:
    _leases.lock.release()


def _forget_after_fork() -> None:
    # os.fork() copies even non-inheritable descriptors: a DataLoader worker of the kernel would keep
    # every run alive after the kernel.
    global _leases
    for write_end in _leases.write_ends:
        with contextlib.suppress(OSError):
            os.close(write_end)
    _leases = _WriteEnds()
    _live_leases.clear()  # The end of the child stops no run.


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork,
        after_in_child=_forget_after_fork,
    )
