"""The watcher of a cluster's run that ends with its kernel: ``launch(..., on=..., outlive_kernel=False)``.

A small process on the kernel's machine holds the read end of a lease (``runs/launch/lease.py``) whose write
end only the kernel has, so that it notices however the kernel ends. It then requests a stop, which the nodes
read, and on Ray also the coordinator of a run that waits for its nodes. On Slurm it cancels the job if the
run has not ended a while later. The kernel starts it as ``python -m
shardscope.runs.backends.kernel_watch <folder> <read end>``; it leaves when the run has ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from shardscope.machine.processes import wait_for_success
from shardscope.records.folder import FINAL, RunFolder
from shardscope.records.json_files import append_line
from shardscope.records.regular_files import open_to_append
from shardscope.runs.backends.slurm_job import SlurmError, cancel, cancel_waiting, read_job_id
from shardscope.runs.launch.environment import add_toolkit_to_path
from shardscope.runs.launch.lease import open_lease, release_lease

POLL_SECONDS = 2.0
STOP_SECONDS = 60.0
"""Time from the stop request to the cancellation: on NFS the nodes may see the request seconds later."""


def start_kernel_watch(folder: RunFolder) -> None:
    """Start the watcher of a run that was just submitted. Raises ``OSError``."""
    read_end, write_end = open_lease()
    try:
        with open_to_append(folder.path / "kernel_watch.log") as log:
            watcher = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(folder.path), str(read_end)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=add_toolkit_to_path(dict(os.environ)),
                pass_fds=(read_end,),
                start_new_session=True,
            )
    except BaseException:
        release_lease(write_end)
        raise
    finally:
        os.close(read_end)

    def wait() -> None:
        wait_for_success(watcher.pid)
        watcher.wait()
        release_lease(write_end)

    # The lease belongs to this thread and not to a Run, whose garbage collection must not end it.
    threading.Thread(target=wait, name=f"shardscope-kernel-{watcher.pid}", daemon=True).start()


def watch_kernel(folder: RunFolder, lease: int) -> None:
    """Wait for the end of the run or of the kernel; then end the run."""
    from shardscope.runs.run_status import RunStatus  # Imported lazily: only the watcher needs it.

    status = RunStatus(folder)
    waiting = select.poll()
    waiting.register(lease, select.POLLIN)
    while not (waiting.poll(POLL_SECONDS * 1000) and not os.read(lease, 1)):
        if status.read()["status"] in FINAL:
            return
    is_requested = _request_stop(folder)
    job_id = read_job_id(folder)
    if job_id is None:  # On Ray only the request ends the run: its disk may be full for a while.
        while not is_requested and status.read()["status"] not in FINAL:
            time.sleep(POLL_SECONDS)
            is_requested = _request_stop(folder)
        return
    # A job that waits has no nodes to read it.
    _try_to_cancel(cancel_waiting, job_id)
    deadline = time.monotonic() + STOP_SECONDS
    while status.read()["status"] not in FINAL:
        if time.monotonic() > deadline:
            _try_to_cancel(cancel, job_id)
            return
        time.sleep(POLL_SECONDS)


def _request_stop(folder: RunFolder) -> bool:
    """Return whether the request could be written."""
    with contextlib.suppress(OSError):
        append_line(folder.control, {"command": "stop", "time": time.time(), "kernel_ended": True})
        return True
    return False


def _try_to_cancel(command: Callable[[str], None], job_id: str) -> None:
    try:
        command(job_id)
    except SlurmError as error:
        print(f"job {job_id} was not cancelled: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    watch_kernel(RunFolder(sys.argv[1]), int(sys.argv[2]))
