"""Process utilities: identity by pid and start time, parent-death signals, termination, free ports."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from shardscope.machine.os_errors import is_absent

# Numbers from linux/prctl.h; Python has no wrapper of prctl(2).
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

KILL_SECONDS = 5.0
"""Seconds in which processes that were sent SIGKILL have to end."""

_SYSTEM_NAMES = {"darwin": "macOS", "win32": "Windows", "emscripten": "Pyodide"}


def explain_missing_linux(task: str) -> str | None:
    """Return why ``task`` ("Launching") is not possible on this system; None on Linux, where it is."""
    if sys.platform == "linux":
        return None
    system = _SYSTEM_NAMES.get(sys.platform, sys.platform)
    return (
        f"{task} needs Linux, for it forks processes that end with their parent; this is {system}. Use WSL 2 "
        "on Windows, a Linux machine, or a Binder session (docs/installing.md). Planning, views, traces and "
        "saved runs work here."
    )


def read_start_time(pid: int) -> float | None:
    """Return the start time of process ``pid``, or None if it has ended or is a zombie.

    Pid and start time together identify one process. Raises ``OSError`` if it cannot be read
    now, for example without a free file descriptor: that does not mean that the process has ended.

    On Linux the unit is clock ticks since boot, from ``/proc/<pid>/stat`` (proc(5), fields 3 and 22).
    psutil's ``create_time`` changes when the wall clock is set.
    """
    if sys.platform == "linux":
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except ProcessLookupError:  # the process ended between open() and read()
            return None
        except OSError as error:
            if is_absent(error):
                return None
            raise
        return None if fields[0] in (b"Z", b"X") else float(fields[19])
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def is_alive(pid: int, started: float) -> bool:
    """Return whether the process ``pid`` that started at ``started`` still runs. Raises ``OSError``."""
    return read_start_time(pid) == started


@functools.cache
def identify_machine() -> str:
    """Return an identifier of this pid namespace, in which alone pids are meaningful."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def die_with_parent(parent: int) -> None:
    """Arrange that this process is killed when ``parent`` dies; exit at once if it has died already.

    torch sets SIGINT as the parent-death signal, which a rank may ignore; this sets SIGKILL. The parent may
    have died before the call, so ``getppid`` is checked afterwards.
    """
    if sys.platform == "linux":
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def end_after_parent(parent: int) -> None:
    """Arrange that this process ends within a second of ``parent``, which may have started it in any thread.

    The signal of :func:`die_with_parent` comes when the thread ends that started the process.
    """
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def keep_exit_codes() -> None:
    """Restore the default SIGCHLD handler. Call it in the main thread, before any child is started.

    If SIGCHLD is ignored, the kernel discards exit codes (wait(2), ECHILD), and ``subprocess`` reports 0. The
    setting is inherited across ``exec``: from a shell, or from ``env --ignore-signal=CHLD``.
    """
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def adopt_orphans() -> None:
    """Become the child subreaper: orphaned descendants become children of this process (Linux)."""
    if sys.platform == "linux":
        _prctl(PR_SET_CHILD_SUBREAPER, 1)


def list_descendants(except_for: int | None = None) -> list[int]:
    """Return the pids of all descendants, zombies included, but for the child ``except_for`` and its own."""
    import psutil

    pids = [child.pid for child in psutil.Process().children(recursive=True)]
    if except_for in pids:
        with contextlib.suppress(psutil.Error):
            spared = {child.pid for child in psutil.Process(except_for).children(recursive=True)}
            return [pid for pid in pids if pid != except_for and pid not in spared]
    return pids


def kill_descendants(except_for: int | None = None) -> bool:
    """Send SIGKILL to the descendants that :func:`list_descendants` returns, and reap them.

    Return False if some are left after :data:`KILL_SECONDS`.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while pids := list_descendants(except_for):
        # List again in each round: a process may have forked between the listing and its signal.
        for pid in pids:
            signal_process(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def kill_session(leader: int) -> None:
    """Send SIGKILL to all other processes in the session of ``leader``, which must not be reaped yet."""
    deadline = time.monotonic() + KILL_SECONDS
    while (pids := _list_session(leader)) and time.monotonic() < deadline:
        for pid in pids:
            signal_process(pid, signal.SIGKILL)
        time.sleep(0.02)


def _list_session(leader: int) -> list[int]:
    """Return the pids of the running processes in the session of ``leader``, without the leader."""
    import psutil

    members = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if pid != leader and os.getsid(pid) == leader and read_start_time(pid) is not None:
                members.append(pid)
    return members


def wait_for_success(pid: int) -> bool | None:
    """Wait until the child ``pid`` has ended. Return whether its exit code is 0; None if unknown.

    The child is not reaped, so its pid is not reused until then. The exit code is unknown if the child was
    reaped already: by another thread, or by the kernel if SIGCHLD is ignored.
    """
    if not hasattr(os, "waitid"):
        return True  # macOS before 3.13, Windows: no way to look without reaping
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_code == os.CLD_EXITED and ended.si_status == 0


def signal_process(pid: int, number: int) -> None:
    """Send a signal; ignore a process that has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def signal_group(leader: int, number: int) -> None:
    """Send a signal to a process group; ignore an empty group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def move_past_standard_streams(descriptor: int) -> int:
    """Return ``descriptor``, or a duplicate above 2 if it is one of the standard streams (0, 1, 2)."""
    import fcntl  # not at module level: the planner runs on Windows, which has no fcntl

    if descriptor > 2:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


def find_free_port() -> int:
    """Return a TCP port on the loopback interface that is free now (it may be taken before use)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
