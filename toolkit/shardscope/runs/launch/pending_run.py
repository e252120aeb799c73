"""The folder of a run that is being launched: hidden at first, renamed once complete, deleted on failure."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from shardscope.records.folder import FINAL, RunFolder
from shardscope.records.json_files import write_json
from shardscope.records.regular_files import open_new
from shardscope.runs.backends.backend import LaunchError
from shardscope.runs.run import Run

MAX_RUNS_OF_A_NAME = 10_000
DELETE_SECONDS = 5.0
"""Time for which a folder is deleted again while a process that is ending still writes into it."""


class PendingRun:
    """The folder of a run that is being launched: hidden until it is complete."""

    def __init__(self, parent: Path, name: str | None) -> None:
        self.parent, self.name = parent, name
        stem = name if name is not None else time.strftime("%Y-%m-%d_%H-%M-%S")
        self.wanted = (parent / stem).absolute()
        # Run names cannot start with a dot, and run lists skip hidden folders.
        self.folder = RunFolder(parent / f".launch-{os.getpid()}-{secrets.token_hex(4)}")
        self.further: tuple[str, ...] = ()
        self._new_parents = [path for path in (parent, *parent.parents) if not path.exists()]

    def create(self, *further: str) -> None:
        """Create the folder, with ``further`` subfolders. Raises ``OSError``."""
        self.further = further
        try:
            self.folder.create(*further)
        except FileExistsError as error:  # The parent is a file; the random name itself cannot exist.
            message = f"folder is {self.parent}, which is a file; runs need a folder."
            raise LaunchError(errno.ENOTDIR, message) from error
        # An empty line, which readers skip: on a disk that becomes full, a stop fits into its block.
        with open_new(self.folder.control) as file:
            file.write(b"\n")

    def publish(self, description: dict[str, object]) -> None:
        """Rename the folder to its name, with a number appended if an ended run has that name.

        rename(2) fails if the target is a folder that is not empty, so of several simultaneous launches with
        the same name, on any machine, exactly one gets it. Raises ``ValueError`` if a live run has the name.
        """
        # Without a lock: a loser of the race for one number tries the next.
        for number in range(1, MAX_RUNS_OF_A_NAME):
            suffix = "" if number == 1 else f"-{number}"
            candidate = RunFolder(self.wanted.with_name(f"{self.wanted.name}{suffix}"))
            if not os.path.lexists(candidate.path):
                # run.json contains the name, so it is written again for each candidate.
                record = {**description, "name": candidate.path.name}
                write_json(self.folder.run_json, record, as_is=("sys_path", "pythonpath", "machine", "base"))
                try:
                    self.folder.path.rename(candidate.path)
                except OSError as error:
                    # rename(2): EEXIST or ENOTEMPTY for a folder with files, ENOTDIR for a file of that name.
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                        raise
                else:
                    self.folder = candidate
                    return
            # A name that the user chose stands for one live run. Times, the default names, are only numbered.
            if self.name is not None and _is_alive(candidate):
                raise ValueError(
                    f"launch.name is {self.name!r}, which a run still has in {candidate.path}; allowed: "
                    f"another name, or none. Nearest fix: run.stop() of that run, which "
                    f"ss.Run.attach({str(candidate.path)!r}) gives."
                )
        raise LaunchError(
            errno.EEXIST, f"{self.parent} holds {number:,} runs named {self.wanted.name}; give another name."
        )

    def delete(self) -> None:
        """Delete the folder, and the parents that were created for it, after everything in it has ended."""
        # Again, because a process that has just been ended may write between the listing and the deletion.
        deadline = time.monotonic() + DELETE_SECONDS
        while True:
            shutil.rmtree(self.folder.path, ignore_errors=True)
            self._delete_without_descriptors()
            if not os.path.lexists(self.folder.path) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        # Innermost first. rmdir fails, as it should, for a parent that another launch uses by now.
        for path in self._new_parents:
            with contextlib.suppress(OSError):
                path.rmdir()

    def _delete_without_descriptors(self) -> None:
        """Delete the files of a run that never started, one by one.

        ``shutil.rmtree`` opens folders and so fails when the process has no free file descriptor.
        """
        folder = self.folder
        with contextlib.suppress(OSError):
            for file in (folder.task, folder.status, folder.run_json, folder.control, folder.supervisor_log):
                file.unlink(missing_ok=True)
            for name in (*folder.SUBFOLDERS, *self.further):
                (folder.path / name).rmdir()
            folder.path.rmdir()


def _is_alive(folder: RunFolder) -> bool:
    if not folder.status.exists():
        return False
    try:
        return Run(folder).status not in FINAL
    except ValueError:  # Damaged: leave that folder alone, the new run gets a number.
        return False


@contextlib.contextmanager
def delay_interrupt() -> Iterator[None]:
    """Delay Ctrl-C until the end of this block.

    An interrupt inside it would leave a run without a handle. Only the main thread gets interrupts.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    frames: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: frames.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if frames:
            before(signal.SIGINT, frames[0])
