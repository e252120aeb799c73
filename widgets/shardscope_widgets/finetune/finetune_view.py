"""The view of a fine-tune from one click: model, data and method, then the run, then a chat."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from html import escape
from pathlib import Path

import ipywidgets as widgets
import traitlets

import shardscope as ss
from shardscope.memory.report import MemoryReport
from shardscope.planner.verdict import assess_plan
from shardscope.runs.launch.free_memory import TooLittleFreeError
from shardscope_widgets.finetune.form import WRONG, FinetuneForm, render_summary
from shardscope_widgets.finetune.run_and_chat import RunAndChat
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_calls import call_in_loop, find_running_loop
from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.kit.fold import Folds
from shardscope_widgets.kit.notice import Notice
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
    ``datasets.Dataset``, a pandas frame or a list of dicts. The plan is for this machine, and ``plan``,
    ``task`` and ``run`` are what the button launches and launched. A run continues when the view is closed.
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
        self.figure: Chart | None = None
        # Filled with the first plan: a chart sends megabytes of front end.
        self._memory_place = widgets.VBox(layout=controls.share_layout())
        self._memory_place.add_class("ss-finetune-memory")
        self.caption = controls.create_html("", "ss-hint")
        self.outcome = RunAndChat(on_end=self._run_ended)
        self.form = FinetuneForm(ss.Cluster.detect(), weights, data, on_change=self._show_setup)
        launch = widgets.HBox([self.button, self.form.note], layout=controls.share_layout())
        launch.add_class("ss-finetune-launch")
        top = widgets.Box([self.form.inputs, self._memory_place], layout=controls.share_layout())
        top.add_class("ss-finetune-top")
        super().__init__(
            [
                Sheet("pickers", "memory", "data", "run", "studio", "finetune"),
                self.headline,
                top,
                Folds(list(self.form.folds.values())),
                launch,
                self.notice,
                self.outcome,
            ]
        )
        for name in ("ss-root", "ss-finetune"):
            self.add_class(name)
        self._show_setup()

    @property
    def task(self) -> ss.Finetune | None:
        """The task to launch; None without one."""
        return self.form.setup.task if self.form.setup is not None else None

    def close(self) -> None:
        """See :class:`View`; the run continues."""
        self.form.close()
        super().close()

    def _show_setup(self) -> None:
        """Show the summary and the memory of the form's plan, or what is missing."""
        if "form" not in vars(self):  # The form is being created.
            return
        setup = self.form.setup
        self.plan = None if setup is None else setup.plan
        (self._memory_place.remove_class if setup is not None else self._memory_place.add_class)("ss-off")
        self._show_button()
        if setup is None:
            self.headline.value = f"<div class='ss-what' role='status'>{escape(self.form.message)}</div>"
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

    def _show_button(self) -> None:
        self.button.disabled = self.form.setup is None or self.outcome.is_active
        self.button.tooltip = IS_ACTIVE if self.outcome.is_active else "Train on this machine"

    # ---- The run

    def launch(self, *, force: bool = False) -> None:
        """Launch the fine-tune; ``force`` launches although too little memory is free."""
        setup = self.form.setup
        if setup is None or self.button.disabled:
            return
        self.button.disabled = True  # A second click must not launch a second run.
        self.notice.show_message("")
        try:
            # ss.launch warns if memory is tight, which the headline shows.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                run = ss.launch(setup.plan, setup.task, force=force)
        except TooLittleFreeError as error:
            self._report_failure(str(error), {"Launch anyway": lambda: self.launch(force=True)})
        except ValueError as error:
            self._report_failure(WRONG, {})
            self.form.show_error(error)
        except Exception as error:  # An exception raised in a handler would not be shown.
            self._report_failure(str(error) or type(error).__name__, {})
        else:
            self.run = run
            self._loop = find_running_loop()
            self.outcome.watch(run)
            self._show_button()

    def _report_failure(self, message: str, actions: dict[str, Callable[[], None]]) -> None:
        self._show_button()
        self.notice.show_message(message, actions, is_error=True)

    def _run_ended(self, run: ss.Run) -> None:
        measured = run.memory()
        if measured.tensor_bytes:
            self._measured = (run.plan, measured)
        # Everything is drawn in the kernel's own thread.
        call_in_loop(self._loop, self.form.update)
