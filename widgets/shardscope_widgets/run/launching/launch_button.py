"""The main button: its label names what it launches, and a note reports why a launch failed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

import shardscope as ss
from shardscope.core.errors import OverridableError
from shardscope.memory.report import MemoryReport
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_calls import call_in_thread
from shardscope_widgets.kit.notice import WRONG_INPUT
from shardscope_widgets.pickers.task import RunOptions, TaskPicker
from shardscope_widgets.run.launching.free_memory import FreeMemoryList, schedule_first_read
from shardscope_widgets.run.launching.launch_offer import LaunchOffer, build_offer
from shardscope_widgets.run.launching.launch_target import LaunchTarget

if TYPE_CHECKING:
    from shardscope.runs.launch.context import Context

IS_BUSY = "A run is active: wait until it ends, or stop it."


class LaunchButton:
    """:attr:`button` for the Studio's header, and :attr:`note` for the text about it.

    ``on_launch(run, notes)`` receives the run that was started. ``on_error(error, retry)`` receives the error
    and, if ``force`` overrides it, a function that launches anyway. A job is submitted in a thread, which may
    take seconds; other runs can be launched while it waits and runs. ``on_options()`` is called when the user
    asks for the options of the job.
    """

    def __init__(
        self,
        machine: ss.Cluster,
        task: TaskPicker,
        options: RunOptions,
        *,
        on_launch: Callable[[ss.Run, str], None],
        on_error: Callable[[Exception, Callable[[], None] | None], None],
        on_options: Callable[[], None],
    ) -> None:
        self.machine, self._task, self._options = machine, task, options
        self._on_launch, self._on_error = on_launch, on_error
        self._plan: ss.Plan | None = None
        self._report: MemoryReport | None = None
        self._busy, self._blocked, self._submitting = False, "", ""
        self.current = LaunchOffer(label="Launch")
        self.button = controls.create_button("Launch", "ss-button", "ss-main-button")
        self.button.on_click(lambda _: self.launch())
        self.note = controls.create_html("", "ss-hint")
        # The keyboard does not reach a disabled button, nor its tooltip: the reason stands below it.
        self.reason = controls.create_html("", "ss-launch-reason", "ss-hint")
        self.target = LaunchTarget(on_change=self.update_offer, on_options=on_options)
        self.head = controls.stack_vertically(self.button, self.reason, self.target.head)
        self.head.add_class("ss-launch")
        self.free = FreeMemoryList()
        # A box around it: a front end of anywidget does not follow changes of its classes.
        self.free_place = controls.stack_vertically(self.free)
        schedule_first_read(self.free)

    def set_plan(self, plan: ss.Plan, report: MemoryReport) -> None:
        """Set the label to what ``plan`` would launch on the target."""
        self._plan, self._report = plan, report
        self.update_offer()

    def update_offer(self) -> None:
        """Update the offer after the task, its inputs or the free memory may have changed."""
        if self._plan is None or self._report is None:
            return
        queue = self.target.queue
        self.current = build_offer(self._plan, self.machine, self._report, self._task, queue)
        self._task.show_usual_rate(self.current.plan or self._plan, as_trial=self.current.is_trial)
        wrong = self._show_task_error()
        # Ranks of two runs would compete for this machine; a scheduler has a queue.
        is_busy = self._busy and queue is None
        # The most general reason comes first: an invalid plan or an active run prevents every launch.
        against = self._blocked or self._submitting or (IS_BUSY if is_busy else "") or wrong
        self._options.set_is_job(queue is not None)
        # The free memory is this machine's.
        controls.show_if(self.free_place, queue is None)
        self.button.description = "Submitting …" if self._submitting else self.current.label
        self.button.disabled = bool(against) or self.current.plan is None
        note = against or self.current.note
        self.button.tooltip = note or self.current.tooltip
        self.note.value = escape(note)
        off = ""
        if self.button.disabled and note:
            spoken = escape(f"{self.button.description} is off: ")
            off = f"<span class='ss-off-screen'>{spoken}</span>{escape(note)}"
        # Two lines of it are in sight, and all of it on hover and in the question Run.
        self.reason.value = f"<span data-said='launch' title='{escape(note, quote=True)}'>{off}</span>"

    @property
    def task(self) -> Callable[[Context], object]:
        """The task that the button would launch. Raises ``ValueError``."""
        plan = self.current.plan or self._plan
        assert plan is not None  # Nothing can be launched before a plan was offered.
        return self._task.build_task(plan, as_trial=self.current.is_trial)

    @property
    def busy(self) -> bool:
        """Return whether a run launched by this button is still active."""
        return self._busy

    @busy.setter
    def busy(self, value: bool) -> None:
        if self._busy and not value:
            self.free.read_in_background()
        self._busy = value
        self.update_offer()

    @property
    def blocked(self) -> str:
        """The reason why nothing can be launched now; empty if launching is possible."""
        return self._blocked

    @blocked.setter
    def blocked(self, value: str) -> None:
        self._blocked = value
        self.update_offer()

    def launch(self, *, force: bool = False) -> None:
        """Launch the current offer; ``force`` launches although too little memory is free."""
        plan, note = self.current.plan, self.current.note
        if plan is None or (self.button.disabled and not force):
            return
        task, target = self.task, self.target.value
        # Before the launch, which takes a moment: a second click must not launch a second run.
        if target is not None:
            self._submit(plan, task, target, note, force=force)
            return
        self.busy = True
        try:
            # ss.launch warns if memory is tight: in a handler the warning would not be shown.
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run = ss.launch(plan, task, outlive_kernel=self._options.outlive.value, force=force)
        except Exception as error:  # An exception raised in a handler would not be shown.
            self.busy = False
            self._report_error(error)
            return
        tight = [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]
        notes = " ".join(filter(None, [note, *tight]))
        _write_note(run, notes)
        self._on_launch(run, notes)

    def _submit(
        self, plan: ss.Plan, task: Callable[[Context], object], target: object, note: str, *, force: bool
    ) -> None:
        """Launch on ``target`` in a thread: a scheduler may take seconds to answer."""
        queue = self.target.queue
        self._submitting = f"The job is being submitted to {queue.label if queue else 'the scheduler'}."
        self.update_offer()
        call_in_thread(
            lambda: ss.launch(plan, task, on=target, force=force),  # type: ignore[arg-type]
            lambda result: self._end_submission(result, note),
            "shardscope-submit",
        )

    def _end_submission(self, result: ss.Run | Exception, note: str) -> None:
        if isinstance(result, ss.Run):
            _write_note(result, note)
        if self.button.comm is None:  # Closed meanwhile; the run goes on.
            return
        self._submitting = ""
        self.update_offer()
        if isinstance(result, ss.Run):
            self._on_launch(result, note)
        else:
            self._report_error(result)

    def _report_error(self, error: Exception) -> None:
        # The user may override some, by the "Launch anyway" button of the notice.
        can_override = isinstance(error, OverridableError)
        self._on_error(error, (lambda: self.launch(force=True)) if can_override else None)

    def _show_task_error(self) -> str:
        """Show the task's error at its input, and return a short version of it."""
        for picker in (self._task, self._options):
            picker.clear_plan_errors()
        if self.target.is_wrong:
            return WRONG_INPUT
        if self._task.missing:
            return self._task.missing
        try:
            _ = self.task
        except ValueError as error:
            field = str(getattr(error, "field", "")).rpartition(".")[2]
            owner = self._options if field in self._options.rows else self._task
            owner.show_plan_error(error)
            return WRONG_INPUT
        return ""


def _write_note(run: ss.Run, notes: str) -> None:
    with contextlib.suppress(OSError):  # The disk has become full: the run has started and is shown.
        run.note = notes
