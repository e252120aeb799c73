"""Residue of a launch: processes, ports, shared memory, temporary files, threads and open files."""

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
"""Environment variable that identifies the processes of one launch, whatever their parent is."""
PATIENCE_SECONDS = 5.0
"""Time for what ends shortly after the run: the operating system reaps processes with a delay."""
SHARED_MEMORY = Path("/dev/shm")
PARTIAL_FILE = re.compile(r"\..+\.\d+")
"""Name of a file that a process with that id is still writing (records/json_files.py)."""
SEGMENTS = Path("/proc/sysvipc/shm")


def adopt_orphans() -> None:
    """Make orphans of a run's processes children of this process, so that they are found (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)


@dataclass(frozen=True)
class Before:
    """State at the start of a launch; ``find_residue`` compares it with the current one."""

    mark: str
    """Value of :data:`MARK` in the environment of the launch's processes."""
    scratch: Path
    """Folder of all temporary files of these processes."""
    threads: frozenset[int] = field(default_factory=lambda: frozenset(_list_threads()))
    files: frozenset[str] = field(default_factory=lambda: frozenset(_list_open_files()))
    num_files: int = field(default_factory=lambda: len(_list_open_files()))
    shared: frozenset[str] = field(default_factory=lambda: frozenset(_list_unused_shared_memory()))
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    children: frozenset[psutil.Process] = field(
        default_factory=lambda: frozenset(psutil.Process().children())
    )
    """Other processes of this one, say the browser of tests that ran before."""

    def find_residue(
        self,
        sessions: Collection[int],
        own_children: Collection[int],
        ports: Collection[int],
        patience: float = PATIENCE_SECONDS,
    ) -> list[str]:
        """Return descriptions of the residue, after waiting ``patience`` seconds for it to disappear.

        ``sessions`` and ``own_children`` are those of :meth:`find_processes`.
        """
        deadline = time.monotonic() + patience
        while residue := list(self._iterate_residue(sessions, own_children, ports)):
            if time.monotonic() > deadline:
                return residue
            time.sleep(0.02)
        return []

    def _iterate_residue(
        self, sessions: Collection[int], own_children: Collection[int], ports: Collection[int]
    ) -> Iterator[str]:
        for process in self.find_processes(sessions, own_children):
            yield f"a process: {_describe(process)}"
        for port in ports:
            if not is_free(port):
                yield f"port {port} is taken"
        for number in _list_threads().keys() - self.threads:
            yield f"a thread: {_list_threads().get(number)}"
        if len(_list_open_files()) > self.num_files:
            new_files = sorted(set(_list_open_files()) - self.files)
            yield f"open files: {', '.join(new_files) or 'more of the same'}"
        for name in sorted(_list_unused_shared_memory() - self.shared):
            yield f"shared memory: {name}"
        for path in sorted(self.scratch.iterdir()):
            yield f"a temporary file: {path.name}"
        if dict(os.environ) != self.environment:
            names = {name for name, _ in self.environment.items() ^ os.environ.items()}
            yield f"the environment: {', '.join(sorted(names))}"

    def find_processes(
        self, sessions: Collection[int], own_children: Collection[int]
    ) -> list[psutil.Process]:
        """Return this process's new descendants and all processes with the mark or in one of ``sessions``.

        ``own_children`` are those that the product itself must reap. Dead orphans are reaped here, as by
        init.
        """
        new_children = [child for child in psutil.Process().children() if child not in self.children]
        below = new_children + [process for child in new_children for process in _list_descendants(child)]
        processes = {process.pid: process for process in below if not _reap_orphan(process, own_children)}
        for process in psutil.process_iter():
            if process.pid != os.getpid() and (
                _has_mark(process, self.mark) or _get_session(process) in sessions
            ):
                processes.setdefault(process.pid, process)
        return list(processes.values())


def find_marked_processes(mark: str) -> list[psutil.Process]:
    """Return all other processes with ``mark`` that have not ended, whoever has started them."""
    marked = [process for process in psutil.process_iter() if process.pid != os.getpid()]
    return [process for process in marked if _has_mark(process, mark)]


def kill_all(processes: Collection[psutil.Process]) -> None:
    """Kill residual processes."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def find_residue_in_folder(folder: Path, secret: bytes = b"") -> list[str]:
    """Describe what a run folder must not keep: pickled task, temporary and partial files, ``secret``."""
    files = RunFolder(folder)
    residue = [path for path in (files.task, files.temporary) if path.exists()]
    for parent, _, names in os.walk(folder):  # Not rglob(), which raises if a folder is deleted meanwhile.
        paths = [Path(parent, name) for name in sorted(names)]
        residue += [
            path
            for path in paths
            if PARTIAL_FILE.fullmatch(path.name) or (secret and _contains_secret(path, secret))
        ]
    return [f"in the run folder: {path.relative_to(folder)}" for path in sorted(residue)]


def _contains_secret(path: Path, secret: bytes) -> bool:
    return path.is_file() and secret in path.read_bytes()


def _list_descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _reap_orphan(process: psutil.Process, own_children: Collection[int]) -> bool:
    """Reap ``process`` if it is a dead orphan. Return whether it is gone."""
    try:
        is_orphan = process.ppid() == os.getpid() and process.pid not in own_children
        if not is_orphan or process.status() != psutil.STATUS_ZOMBIE:
            return False
        os.waitpid(process.pid, os.WNOHANG)
    except (psutil.NoSuchProcess, ChildProcessError):
        pass
    return True


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:  # Not psutil's environ(), which parses all of it, for every process of the machine.
        block = Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{MARK}={mark}".encode() in block.split(b"\0")


def _get_session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def _describe(process: psutil.Process) -> str:
    try:
        line = " ".join(process.cmdline())[-200:]
        return f"{process.pid} ({process.status()}, child of {process.ppid()}): {line}"
    except psutil.Error:
        return f"{process.pid}, which went just now"


def is_free(port: int) -> bool:
    """Return whether a process could listen on ``port`` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _list_threads() -> dict[int, str]:
    return {thread.ident or 0: thread.name for thread in threading.enumerate()}


def _list_open_files() -> list[str]:
    paths = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # The one that lists them is gone when it is read.
            paths.append(str(entry.readlink()))
    return paths


def _list_unused_shared_memory() -> set[str]:
    """Return POSIX files and System V segments that no live process uses: other programs have some too."""
    names = {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()
    used = _list_used_shared_memory() if names else set()
    unused = {str(SHARED_MEMORY / name) for name in names if str(SHARED_MEMORY / name) not in used}
    with contextlib.suppress(OSError):
        for line in SEGMENTS.read_text().splitlines()[1:]:
            _, number, _, _, creator, _, num_attached = line.split()[:7]
            if num_attached == "0" and not psutil.pid_exists(int(creator)):
                unused.add(f"segment {number}")
    return unused


def _list_used_shared_memory() -> set[str]:
    """Return the files under /dev/shm that some process has mapped or open."""
    used: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
            used.update(
                f"/dev/shm{line.partition('/dev/shm')[2]}"
                for line in maps.splitlines()
                if "/dev/shm/" in line
            )
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    used.add(str(entry.readlink()))
    return used
