"""Processes: who is still the one we started, who dies with whom, and a port nobody uses."""

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

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def start_of(pid: int) -> float | None:
    """When process ``pid`` started, or None if it is gone or a zombie; with the pid it names one process.

    Raises ``OSError`` where that cannot be read now: a process without a free descriptor sees nobody die.

    On Linux in clock ticks since boot, from ``/proc/<pid>/stat``: psutil's ``create_time`` moves when the
    wall clock is set (proc(5), fields 3 and 22).
    """
    if sys.platform == "linux":
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except ProcessLookupError:  # It ended between open() and read().
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
    """Whether the very process that had ``pid`` and began at ``started`` still runs. Raises ``OSError``."""
    return start_of(pid) == started


@functools.cache
def this_machine() -> str:
    """Names the process table we see: a pid means something only to those who see the same one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def die_with_parent(parent: int) -> None:
    """Be killed when ``parent`` dies, in whatever way. Returns only while ``parent`` is our parent.

    torch asks for SIGINT on the parent's death, which a rank that ignores SIGINT never sees; we ask for
    SIGKILL. The parent may have died before we asked, hence the look at ``getppid`` afterwards.
    """
    if sys.platform == "linux":
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def keep_exit_codes() -> None:
    """Have this process learn how its children end. Call it in the main thread, before a child is started.

    Where SIGCHLD is ignored, the system drops exit codes (wait(2), ECHILD), and ``subprocess`` takes that for
    0. The setting is inherited, past ``exec`` too: from a shell, from ``env --ignore-signal=CHLD``.
    """
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none escapes us (Linux)."""
    if sys.platform == "linux":
        _prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> list[int]:
    """Pids of all processes below this one, zombies included."""
    import psutil

    return [child.pid for child in psutil.Process().children(recursive=True)]


def kill_descendants(timeout_seconds: float = 5.0) -> bool:
    """SIGKILL everything below this process and reap it. Whether nothing is left."""
    deadline = time.monotonic() + timeout_seconds
    while below := descendants():
        for pid in below:
            signal_process(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def end_session(leader: int, timeout_seconds: float = 5.0) -> None:
    """SIGKILL whatever else is in the session that ``leader`` began; ``leader`` itself is not reaped yet."""
    deadline = time.monotonic() + timeout_seconds
    while (others := _in_session(leader)) and time.monotonic() < deadline:
        for pid in others:
            signal_process(pid, signal.SIGKILL)
        time.sleep(0.02)


def _in_session(leader: int) -> list[int]:
    import psutil

    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if pid != leader and os.getsid(pid) == leader and start_of(pid) is not None:
                found.append(pid)
    return found


def ended_well(pid: int) -> bool | None:
    """Wait until ``pid``, a child, has ended. Return whether with code 0; None if nobody can tell.

    It is not reaped: until somebody does, no other process gets its number. Nobody can tell where it was
    reaped already, by another thread or, where SIGCHLD is ignored, by the system.
    """
    if not hasattr(os, "waitid"):
        return True  # Nobody can look without reaping it.
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_code == os.CLD_EXITED and ended.si_status == 0


def signal_process(pid: int, number: int) -> None:
    """Send a signal; a process that is already gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def signal_group(leader: int, number: int) -> None:
    """Send a signal to a process group; an empty group is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def move_past_standard_streams(descriptor: int) -> int:
    """Return ``descriptor``, or a duplicate if it is 0, 1 or 2, the place of a standard stream."""
    import fcntl  # Not above: the planner works on Windows, which has none.

    if descriptor > 2:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


def free_port() -> int:
    """A TCP port on the loopback interface that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def num_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
