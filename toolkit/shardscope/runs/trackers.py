"""trackio and wandb: a process of its own that reports a run's metrics, started by the supervisor.

Not a rank, whose memory and time they would change, and not the supervisor, which must outlive what fails.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Collection, Mapping
from typing import IO

from shardscope.machine.python_process import build_module_command
from shardscope.records.folder import RunFolder

IN_A_PROCESS = ("trackio", "wandb")
"""Names of ``report_to`` that are reported by the process; the supervisor writes TensorBoard's files."""
FINISH_SECONDS = 60.0
"""Time that the process has after the end of the run to report the last metrics."""
OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Settings of the process that are not in the environment: without them, nothing is sent over a network."""


class TrackerProcess:
    """The process that reports one run's metrics. Its failure is logged and has no other effect."""

    def __init__(self, folder: RunFolder, report_to: Collection[str]) -> None:
        """Prepare the process for ``report_to``; without any of :data:`IN_A_PROCESS` none is started."""
        self._folder = folder
        self._names = [name for name in IN_A_PROCESS if name in report_to]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    def start(self, log: IO[bytes]) -> None:
        """Start the process, if there is something to report. Raises ``OSError``."""
        if not self._names:
            return
        module = "shardscope.runs.tracker_process"
        self._process = subprocess.Popen(
            build_module_command(module, str(self._folder.path), *self._names),
            # Its end tells the process that the run has ended, also if the supervisor was killed.
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=build_environment(os.environ),
            start_new_session=True,
        )

    def finish(self) -> None:
        """Wait until the last metrics are reported, or kill the process after :data:`FINISH_SECONDS`."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(FINISH_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def build_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the process, in which the user's own settings of the trackers are kept."""
    return {**OFFLINE, **environment}
