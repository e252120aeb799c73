"""The view of a fine-tune from one click: model, data and method, then the run, then a chat."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ipywidgets as widgets
import traitlets

import shardscope as ss
from shardscope.core.errors import OverridableError
from shardscope.memory.report import MemoryReport
from shardscope.planner.verdict import assess_plan
from shardscope.runs.resume import resume_run
from shardscope_widgets.finetune.form import FinetuneForm, render_missing, render_summary
from shardscope_widgets.finetune.launch_place import LaunchPlace
from shardscope_widgets.finetune.run_and_chat import RunAndChat
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_calls import call_in_loop, call_in_thread, find_running_loop, try_call
from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.kit.fold import Fold, Folds
from shardscope_widgets.kit.notice import WRONG_INPUT, Notice
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
from shardscope_widgets.memory.figure import create_memory_figure, draw_memory
from shardscope_widgets.memory.rows import ShownMemory
from shardscope_widgets.memory.table import write_caption
from shardscope_widgets.memory.verdict_line import render_verdict

TIERS = ("predicted", "measured")
"""Rows of the memory chart."""
IS_ACTIVE = "A run is active: see below."


class FinetuneView(View):
    """Fine-tuning from one click: ``FinetuneView()``, or with the first inputs.

    ``weights`` is the folder of a Hugging Face model, "smollm2-135m-instruct", or a name on the Hub, which is
    downloaded at the press of a button; ``data`` a path, a data set's name, or rows in memory: a
    ``datasets.Dataset``, a pandas frame or a list of dicts. The plan is for this machine, or, where a
    scheduler answers, for one node of the queue that is chosen below the button. ``plan``, ``task`` and
    ``run`` are what the button launches and launched. A run continues when the view is closed.
    """

    plan = traitlets.Any(allow_none=True, default_value=None, help="The plan to launch; None without one.")
    run = traitlets.Any(allow_none=True, default_value=None, help="The run that the button started last.")

    def __init__(self, weights: str | Path = "", data: object = "") -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._measured: tuple[ss.Plan, MemoryReport] | None = None
        """The plan of the last run, with the memory that it took."""
        self.headline = controls.create_html("", "ss-headline")
        self.notice = Notice()
        self.button = controls.create_button("Fine-tune", "ss-button", "ss-main-button", disabled=True)
        self.button.on_click(lambda _: self.launch())
        self._submitting = ""
        """Where a job is being submitted to; empty if none is."""
        self._machine = ss.Cluster.detect()
        self.place = LaunchPlace(self._machine, on_change=self._follow_place, on_options=self._open_job)
        self.figure: Chart | None = None
        # Filled with the first plan: a chart sends megabytes of front end.
        self._memory_place = widgets.VBox(layout=controls.share_layout())
        self._memory_place.add_class("ss-finetune-memory")
        self.caption = controls.create_html("", "ss-hint")
        self.outcome = RunAndChat(on_end=self._run_ended, on_resume=self._resume)
        self.form = FinetuneForm(self._machine, weights, data, on_change=self._show_setup)
        self.job = Fold("Job", self.place.target.options)
        head = controls.stack_vertically(self.button, self.place)
        head.add_class("ss-launch")
        launch = widgets.HBox([head, self.form.note], layout=controls.share_layout())
        launch.add_class("ss-finetune-launch")
        top = widgets.Box([self.form.inputs, self._memory_place], layout=controls.share_layout())
        top.add_class("ss-finetune-top")
        super().__init__(
            [
                Sheet("pickers", "memory", "data", "run", "studio", "finetune"),
                self.headline,
                top,
                Folds([*self.form.folds.values(), self.job]),
                launch,
                self.notice,
                self.outcome,
            ]
        )
        controls.add_classes(self, "ss-root", "ss-finetune")
        self._planned_for: ss.Cluster | None = self._machine
        self._follow_place()
        self._show_setup()
        self.place.search()

    @property
    def task(self) -> ss.Finetune | None:
        """The task to launch; None without one."""
        return self.form.setup.task if self.form.setup is not None else None

    def close(self) -> None:
        """See :class:`View`; the run continues."""
        self.form.close()
        self.place.stop()
        super().close()

    def _show_setup(self) -> None:
        """Show the summary and the memory of the form's plan, or what is missing."""
        if "form" not in vars(self):  # The form is being created.
            return
        setup = self.form.setup
        self.form.preview.set_plan(None if setup is None else setup.plan)
        controls.show_if(self._memory_place, setup is not None)
        self._show_button()
        if setup is None:
            self.plan = None
            self.headline.value = render_missing(self.form.message)
            return
        preview = self.form.preview_of_data
        summary = render_summary(
            setup.plan, setup.task, setup.length, None if preview is None else preview.num_rows
        )
        verdict = render_verdict(setup.plan, setup.report, assess_plan(setup.plan, setup.report))
        self.headline.value = summary + verdict
        if self.figure is None:
            self.figure = create_memory_figure(lambda _: None)
            self._memory_place.children = [self.figure, self.caption]
        reports = {"predicted": setup.report}
        if self._measured is not None and self._measured[0] == setup.plan:
            reports["measured"] = self._measured[1]
        shown = ShownMemory(setup.plan, reports, tiers=TIERS)
        draw_memory(self.figure, shown)
        self.caption.value = write_caption(shown)
        self.plan = setup.plan  # Last: whoever waits for it finds the rest shown.

    def _show_button(self) -> None:
        against = IS_ACTIVE if self.outcome.is_active else self._submitting
        is_wrong = self.place.target.is_wrong
        self.button.disabled = self.form.setup is None or is_wrong or bool(against)
        self.button.description = "Submitting …" if self._submitting else "Fine-tune"
        self.button.tooltip = against or f"Train on {self.place.title}"

    # ---- Where it is launched

    def _follow_place(self) -> None:
        """Plan for the machines that were chosen."""
        if "form" not in vars(self):  # The form is being created.
            return
        queue = self.place.target.queue
        has_options = queue is not None and bool(queue.scheduler.options)
        controls.show_if(self.job, has_options)
        self.job.head.wrong = self.place.target.is_wrong
        job = self.place.target.job
        self.job.head.answer = "" if job is None else job.description
        if self._planned_for != self.place.cluster:
            self._planned_for = self.place.cluster
            self.form.set_machine(self.place.cluster)
        self._show_button()

    def _open_job(self) -> None:
        self.job.head.expanded = True

    # ---- The run

    def launch(self, *, force: bool = False) -> None:
        """Launch the fine-tune; ``force`` launches although too little memory is free."""
        setup = self.form.setup
        if setup is None or self.button.disabled:
            return
        self.button.disabled = True  # A second click must not launch a second run.
        self.notice.show_message("")
        target = self.place.target.value
        show = partial(self._show_result, retry=partial(self.launch, force=True))
        if target is not None:
            self._submit(
                lambda: ss.launch(setup.plan, setup.task, on=target, force=force),  # type: ignore[arg-type]
                self.place.title,
                show,
            )
            return
        # ss.launch warns if memory is tight, which the headline shows.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            result = try_call(lambda: ss.launch(setup.plan, setup.task, force=force))
        show(result)

    def _resume(self, run: ss.Run, *, force: bool = False) -> None:
        """Launch a run of the steps that ``run``, which ended early, has left; ``force`` as in ``launch``."""
        if self.outcome.is_active or self._submitting:
            return
        self.button.disabled = True
        self.notice.show_message("")
        show = partial(self._show_result, retry=partial(self._resume, run, force=True), is_resumed=True)
        if run.target:
            self._submit(partial(resume_run, run, force=force), run.target, show)
        else:
            show(try_call(partial(resume_run, run, force=force)))

    def _submit(
        self, start: Callable[[], ss.Run], place: str, show: Callable[[ss.Run | Exception], None]
    ) -> None:
        """Launch in a thread: a scheduler may take seconds to answer."""
        self._submitting = f"The job is being submitted to {place}."
        self._show_button()
        call_in_thread(start, show, "shardscope-submit")

    def _show_result(
        self, result: ss.Run | Exception, *, retry: Callable[[], None], is_resumed: bool = False
    ) -> None:
        """Show the run that was launched, or why none was."""
        if self.comm is None:  # The view was closed meanwhile; the run goes on.
            return
        was_submitted, self._submitting = bool(self._submitting), ""
        can_override = isinstance(result, OverridableError)
        if not isinstance(result, Exception):
            self.run = result
            self._loop = find_running_loop()
            self.outcome.watch(result)
        elif isinstance(result, ValueError) and not (was_submitted or is_resumed or can_override):
            self.notice.show_message(WRONG_INPUT, is_error=True)
            self.form.show_error(result)
        else:
            actions = {"Launch anyway": retry} if can_override else {}
            self.notice.show_message(str(result) or type(result).__name__, actions, is_error=True)
        self._show_button()

    def _run_ended(self, run: ss.Run) -> None:
        measured = run.memory()
        if measured.tensor_bytes:
            self._measured = (run.plan, measured)
        # Everything is drawn in the kernel's own thread.
        call_in_loop(self._loop, self._update_form)

    def _update_form(self) -> None:
        if self.comm is not None:  # Otherwise the view was closed.
            self.form.update()
