"""Starts and ends of the Studio's runs: which run occupies this machine, and what an ended one measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardscope_widgets.kit.background_calls import call_in_loop, find_running_loop
from shardscope_widgets.run.launching.launch_button import LaunchButton
from shardscope_widgets.studio.queue_search import QueueSearch
from shardscope_widgets.time.rows import RunSteps
from shardscope_widgets.trace import TracePage

if TYPE_CHECKING:
    import shardscope as ss
    from shardscope.runs.explain.measured import MeasuredMemory

TRACE_FOLLOWS = "The trace appears here when the run has ended."


class MeasuredRun(NamedTuple):
    """The measurements of one run."""

    plan: ss.Plan
    memory: MeasuredMemory
    steps: RunSteps | None
    """None if it measured no step."""


class RunEvents:
    """Keeps the launch button, the queues and the trace up to date.

    ``on_end(measured)`` is called in the kernel's loop when a run has ended; None if it has no measurements.
    """

    def __init__(
        self,
        launch: LaunchButton,
        queues: QueueSearch,
        trace: TracePage,
        on_end: Callable[[MeasuredRun | None], None],
    ) -> None:
        self._launch, self._queues, self._trace, self._on_end = launch, queues, trace, on_end
        self._occupied_by: Path | None = None
        """Folder of the active run of this machine that was launched or resumed here last."""
        self._loop = find_running_loop()
        """The kernel's, in whose thread the end of a run is handled."""

    def report_launched(self, run: ss.Run) -> None:
        """Handle a run that the launch button has started."""
        if run.target:
            self._queues.start()  # Nodes that were idle may be taken.
        elif self._launch.busy:
            self._occupied_by = run.folder
        self._trace.show_hint(TRACE_FOLLOWS)

    def report_resumed(self, run: ss.Run) -> None:
        """Handle a run that another button has started."""
        if not run.target:
            self._launch.busy = True
        self.report_launched(run)

    def report_ended(self, run: ss.Run) -> None:
        """Handle the end of a run, which its view reports in a thread of its own."""
        try:
            measured = _read_measured_run(run)
        except (OSError, ValueError):  # The run's view reports a folder that cannot be read.
            measured = None
        call_in_loop(self._loop, lambda: self._handle_end(run, measured))

    def _handle_end(self, run: ss.Run, measured: MeasuredRun | None) -> None:
        if self._trace.comm is None:  # The Studio was closed.
            return
        if self._occupied_by in (None, run.folder):
            self._occupied_by = None
            self._launch.busy = False
        if run.target:
            self._queues.start()
        self._on_end(measured)
        self._trace.show_run(run)


def _read_measured_run(run: ss.Run) -> MeasuredRun | None:
    """Read the files of ``run``; None if its folder has no plan."""
    try:
        plan = run.plan
    except ValueError:
        return None
    return MeasuredRun(plan, run.memory(), RunSteps.from_run(run))
