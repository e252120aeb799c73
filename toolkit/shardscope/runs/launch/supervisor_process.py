"""The supervisor as a process: its signals, and the lock that makes it the only one of its run."""

from __future__ import annotations

import os
import signal
from types import FrameType

from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import read_lines
from shardscope.runs.backends.end_notice import SLURM_SIGNALS


class ReceivedSignals:
    """The signals of this process that end its run. All attempts share them: none is lost between two."""

    def __init__(self) -> None:
        self._latest: int | None = None

    def install_handlers(self) -> None:
        """Store signals from now on. The main loop then stops the run in an orderly way."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._store)

    def read(self, *, of_slurm: bool) -> int | None:
        """Return the signal that arrived last and is not settled; None if there is none.

        ``of_slurm``: Slurm's signals are blocked by the node process, because they would end the ranks, too.
        """
        pending = signal.sigtimedwait(SLURM_SIGNALS, 0) if of_slurm else None
        if pending is not None:
            self._latest = pending.si_signo
        return self._latest

    def settle(self, number: int) -> None:
        """Forget a signal that does not end the run."""
        if self._latest == number:
            self._latest = None

    def _store(self, number: int, _frame: FrameType | None) -> None:
        self._latest = number


def lock_run(folder: RunFolder) -> int | None:
    """Lock the run for this process and return the descriptor that holds the lock until the process ends.

    Return None if the file system has no locks. Raises ``ValueError`` if the run has or had a supervisor: a
    second one would find no task and write that the run failed.
    """
    import fcntl  # Imported lazily: this package is also imported on Windows, which has no fcntl.

    try:
        # Lock the log: it exists already and is never replaced by another file.
        descriptor = os.open(
            folder.supervisor_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{folder.path} already has a running supervisor.") from None
    except OSError:
        return None
    if isinstance(folder, NodeFolder):  # Earlier attempts have written statuses.
        if folder.supervisor.exists():
            raise ValueError(f"attempt {folder.attempt} of the run in {folder.path} was started before.")
        return descriptor
    # The lock of a supervisor that has ended is gone, but its statuses are not.
    statuses = {str(record.get("status")) for record in read_lines(folder.status)} - {"queued", "starting"}
    if statuses:
        raise ValueError(f"the run in {folder.path} was started before; its statuses: {', '.join(statuses)}.")
    return descriptor
