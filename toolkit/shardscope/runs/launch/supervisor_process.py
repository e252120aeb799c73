"""The lock that makes a process the only supervisor of its run."""

from __future__ import annotations

import os

from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import read_lines


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
