"""What a launch left behind: processes, ports, shared memory, temporary files, threads and open files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from shardscope.machine.processes import PR_SET_CHILD_SUBREAPER
from shardscope.records.folder import RunFolder

MARK = "SHARDSCOPE_SOAK"
"""Environment variable by which processes of one launch are known, whoever is their parent."""
PATIENCE_SECONDS = 5.0
"""For what ends a moment after the run has: the kernel buries processes in its own time."""
SHARED_MEMORY = Path("/dev/shm")
HALF = re.compile(r"\..+\.\d+")
"""A file that is still being written, by a process of that number: records/files.py makes them."""
SEGMENTS = Path("/proc/sysvipc/shm")


def be_the_parent_of_orphans() -> None:
    """From now on whatever a run's processes leave becomes a child of this one, and so is seen (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)


@dataclass(frozen=True)
class Before:
    """What there was when a launch began; ``left`` says what came and did not go."""

    mark: str
    """The value of :data:`MARK` that the launch's processes have."""
    scratch: Path
    """Where all temporary files of these processes would be."""
    threads: frozenset[int] = field(default_factory=lambda: frozenset(_threads()))
    files: frozenset[str] = field(default_factory=lambda: frozenset(_open_files()))
    num_files: int = field(default_factory=lambda: len(_open_files()))
    shared: frozenset[str] = field(default_factory=lambda: frozenset(_shared_memory()))
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def left(
        self,
        sessions: Collection[int],
        ours: Collection[int],
        ports: Collection[int],
        patience: float = PATIENCE_SECONDS,
    ) -> list[str]:
        """What is left, in words; empty as soon as nothing is. ``sessions`` and ``ours`` as below."""
        deadline = time.monotonic() + patience
        while found := list(self._found(sessions, ours, ports)):
            if time.monotonic() > deadline:
                return found
            time.sleep(0.02)
        return []

    def _found(
        self, sessions: Collection[int], ours: Collection[int], ports: Collection[int]
    ) -> Iterator[str]:
        for process in left_processes(self.mark, sessions, ours):
            yield f"a process: {_in_words(process)}"
        for port in ports:
            if not is_free(port):
                yield f"port {port} is taken"
        for number in _threads().keys() - self.threads:
            yield f"a thread: {_threads().get(number)}"
        if len(_open_files()) > self.num_files:
            yield f"open files: {', '.join(sorted(set(_open_files()) - self.files)) or 'more of the same'}"
        for name in sorted(_shared_memory() - self.shared):
            yield f"shared memory: {name}"
        for path in sorted(self.scratch.iterdir()):
            yield f"a temporary file: {path.name}"
        if dict(os.environ) != self.environment:
            names = {name for name, _ in self.environment.items() ^ os.environ.items()}
            yield f"the environment: {', '.join(sorted(names))}"


def left_processes(mark: str, sessions: Collection[int], ours: Collection[int]) -> list[psutil.Process]:
    """Below this process, or of ``mark``, or of one of the ``sessions``, wherever they are now.

    ``ours``: children that the product has to reap. Dead orphans are buried here, as any init would.
    """
    below = psutil.Process().children(recursive=True)
    found = {process.pid: process for process in below if not _bury(process, ours)}
    for process in psutil.process_iter():
        if process.pid != os.getpid() and (_has(process, mark) or _session(process) in sessions):
            found.setdefault(process.pid, process)
    return list(found.values())


def end(processes: Collection[psutil.Process]) -> None:
    """Kill what was left, once it has been told."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def left_in_folder(folder: Path, secret: bytes = b"") -> list[str]:
    """What a run's own folder should not keep: the pickled task, temporary and half files, a secret."""
    files = RunFolder(folder)
    found = [path for path in (files.task, files.temporary) if path.exists()]
    for place, _, names in os.walk(folder):  # Not rglob(), which raises where somebody deletes meanwhile.
        paths = [Path(place, name) for name in sorted(names)]
        found += [path for path in paths if HALF.fullmatch(path.name) or (secret and _holds(path, secret))]
    return [f"in the run folder: {path.relative_to(folder)}" for path in sorted(found)]


def _holds(path: Path, secret: bytes) -> bool:
    return path.is_file() and secret in path.read_bytes()


def _bury(process: psutil.Process, ours: Collection[int]) -> bool:
    """Whether it is gone, or was a dead orphan and is gone now."""
    try:
        is_orphan = process.ppid() == os.getpid() and process.pid not in ours
        if not is_orphan or process.status() != psutil.STATUS_ZOMBIE:
            return False
        os.waitpid(process.pid, os.WNOHANG)
    except (psutil.NoSuchProcess, ChildProcessError):
        pass
    return True


def _has(process: psutil.Process, mark: str) -> bool:
    try:  # Not psutil's environ(), which parses all of it, for every process of the machine.
        block = Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{MARK}={mark}".encode() in block.split(b"\0")


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def _in_words(process: psutil.Process) -> str:
    try:
        line = " ".join(process.cmdline())[-200:]
        return f"{process.pid} ({process.status()}, child of {process.ppid()}): {line}"
    except psutil.Error:
        return f"{process.pid}, which went just now"


def is_free(port: int) -> bool:
    """Whether somebody could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _threads() -> dict[int, str]:
    return {thread.ident or 0: thread.name for thread in threading.enumerate()}


def _open_files() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # The one that lists them is gone when it is read.
            found.append(str(entry.readlink()))
    return found


def _shared_memory() -> set[str]:
    """POSIX files and System V segments that nobody alive holds, for others on this machine use such too."""
    names = {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()
    held = _held() if names else set()
    found = {str(SHARED_MEMORY / name) for name in names if str(SHARED_MEMORY / name) not in held}
    with contextlib.suppress(OSError):
        for line in SEGMENTS.read_text().splitlines()[1:]:
            _, number, _, _, creator, _, num_attached = line.split()[:7]
            if num_attached == "0" and not psutil.pid_exists(int(creator)):
                found.add(f"segment {number}")
    return found


def _held() -> set[str]:
    """Files under /dev/shm that some process has mapped or open."""
    found: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
            found.update(
                f"/dev/shm{line.partition('/dev/shm')[2]}"
                for line in maps.splitlines()
                if "/dev/shm/" in line
            )
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(str(entry.readlink()))
    return found
