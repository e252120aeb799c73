"""The watcher of a cluster's run that ends with its kernel: ``launch(..., on=..., outlive_kernel=False)``.

A small process on the kernel's machine holds the read end of a lease (``runs/launch/lease.py``) whose write
end only the kernel has, so that it notices however the kernel ends. It then requests a stop, which the nodes
read, and on Ray also the coordinator of a run that waits for its nodes. On Slurm it cancels the job if the
run has not ended a while later. The kernel starts it before the run is submitted, as ``python -m
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
from shardscope.runs.backends.slurm_job import SlurmError, cancel, cancel_waiting, read_job_id
from shardscope.runs.launch.environment import add_toolkit_to_path
from shardscope.runs.launch.lease import release_lease, start_lease_thread, start_leased_process

POLL_SECONDS = 2.0
RESTART_SECONDS = 1.0
"""Time before a watcher that was killed, such as by the kernel's out-of-memory killer, is replaced."""
STOP_SECONDS = 60.0
"""Time from the stop request to the cancellation: on NFS the nodes may see the request seconds later."""


class KernelWatch:
    """The watcher of one run and its lease, in the kernel that has launched the run."""

    def __init__(self, folder: RunFolder) -> None:
        """Start the watcher; the run need not have started yet. Raises ``OSError``."""
        self._folder = folder
        self._is_stopped = threading.Event()
        self._watcher, self._write_end = self._start_watcher()
        # The lease belongs to this thread and not to a Run, whose garbage collection must not end it.
        try:
            start_lease_thread(self._watcher, self._hold)
        except BaseException:
            self._watcher.kill()
            self._watcher.wait()
            release_lease(self._write_end)
            raise

    def stop(self) -> None:
        """End the watcher without ending the run: for a launch that has failed."""
        self._is_stopped.set()
        self._watcher.kill()

    def _start_watcher(self) -> tuple[subprocess.Popen[bytes], int]:
        log, environment = self._folder.path / "kernel_watch.log", add_toolkit_to_path(dict(os.environ))
        watcher, write_end = start_leased_process(__name__, self._folder, log, environment, has_lease=True)
        assert write_end is not None
        return watcher, write_end

    def _hold(self) -> None:
        """Hold the lease until the watcher ends by itself; replace one that was killed."""
        while True:
            ended_normally = wait_for_success(self._watcher.pid)
            if ended_normally is not False:
                self._is_stopped.set()
            is_stopped = self._is_stopped.wait(RESTART_SECONDS)
            self._watcher.wait()
            release_lease(self._write_end)
            if is_stopped or not self._folder.path.exists():
                return
            try:
                self._watcher, self._write_end = self._start_watcher()
            except OSError as error:
                print(f"The run {self._folder.path} will not end with this kernel: {error}", file=sys.stderr)
                return
            if self._is_stopped.is_set():  # stop() may have killed the one before.
                self._watcher.kill()


def watch_kernel(folder: RunFolder, lease: int) -> None:
    """Wait for the end of the run or of the kernel; then end the run."""
    from shardscope.runs.run_status import RunStatus  # Imported lazily: only the watcher needs it.

    status = RunStatus(folder)
    waiting = select.poll()
    waiting.register(lease, select.POLLIN)
    while not (waiting.poll(POLL_SECONDS * 1000) and not os.read(lease, 1)):
        if status.read()["status"] in FINAL or not folder.path.exists():
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
