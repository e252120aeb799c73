"""The Studio widget: pickers make the plan, views show it, one button trains it.

State flows one way: pickers -> ``studio.plan`` -> views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import ipywidgets as widgets
import traitlets

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.core.number_format import format_count
from shardscope.memory.report import MemoryReport
from shardscope.planner.checks import Finding
from shardscope.planner.checks.usual_rates import limit_rate
from shardscope.planner.verdict import Verdict, assess_plan
from shardscope.records.folder import FINAL
from shardscope.training.tasks.choices import recommend
from shardscope_widgets.checks.findings import sort_worst_first, summarize_findings
from shardscope_widgets.checks.script import ScriptChecks
from shardscope_widgets.checks.view import ChecksView
from shardscope_widgets.finetune import FinetunePage
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_calls import (
    Debounced,
    call_in_loop,
    find_running_loop,
)
from shardscope_widgets.kit.fold import Fold, Folds
from shardscope_widgets.kit.notice import WRONG_INPUT, Notice
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.tabs import Tabs
from shardscope_widgets.kit.view import View
from shardscope_widgets.memory.fit_search import FitSearch
from shardscope_widgets.memory.view import MemoryView
from shardscope_widgets.pickers.base import label_changes
from shardscope_widgets.pickers.cluster import ANYWHERE
from shardscope_widgets.pickers.open_plan import OpenPlan
from shardscope_widgets.plans.page import PlansPage
from shardscope_widgets.run.export_panel import ExportPanel
from shardscope_widgets.run.launching.launch_button import LaunchButton
from shardscope_widgets.run.runs_view import RunsView, count_runs
from shardscope_widgets.run.view import RunView
from shardscope_widgets.studio.check_results import CheckResults
from shardscope_widgets.studio.fine_tune import FINE_TUNE, FineTuneTab
from shardscope_widgets.studio.head import Head
from shardscope_widgets.studio.inputs import StudioInputs
from shardscope_widgets.studio.plan_changes import PlanChanges
from shardscope_widgets.studio.queue_search import QueueSearch
from shardscope_widgets.studio.run_events import MeasuredRun, RunEvents
from shardscope_widgets.time.rows import RunSteps, build_shown_step
from shardscope_widgets.time.view import StepView
from shardscope_widgets.trace import TracePage

TABS = ("Memory", "Time", "Plans", "Checks", FINE_TUNE, "Runs", "Trace")
PAUSE_SECONDS = 0.25
"""Delay after the last input before fixes and findings are computed: both are slower than the rest."""
TRACE_PIXELS = 340
Page = TypeVar("Page", bound=widgets.Widget)


class Studio(View):
    """The Studio widget: plan, launch and inspect training. It shows ``studio.plan`` and ``studio.run``."""

    plan = traitlets.Any(help="The last valid plan.")
    run = traitlets.Any(allow_none=True, default_value=None, help="The run that was last started or opened.")
    pins = traitlets.Tuple(help="Plans pinned for comparison, in the order in which they were pinned.")

    def __init__(self) -> None:
        self._planning = False
        self._report: MemoryReport | None = None
        self._verdict: Verdict | None = None
        self._drawn: dict[str, object] = {}
        """Tab -> the plan that its page currently shows."""
        self._measured: list[tuple[ss.Plan, RunSteps]] = []
        """Measured steps, stored until the Time view is created."""
        self._loop = find_running_loop()
        self._make_questions()
        self._make_pages()
        self.sheet = Sheet(
            "pickers", "memory", "time", "plans", "checks", "run", "data", "studio", "finetune", "trace"
        )
        body = widgets.Box([self.questions, self._main], layout=controls.share_layout())
        body.add_class("ss-body")
        super().__init__([self.sheet, self.head, self.notice, body])
        controls.add_classes(self, "ss-root", "ss-studio")
        self._observe_inputs()
        self._pause = Debounced(self._on_pause, PAUSE_SECONDS)
        self._show_page()
        self._replan()
        self._queues.start_later()

    # ---- components

    def _make_questions(self) -> None:
        """Build the left column: one collapsible question for each picker."""
        inputs = self._inputs = StudioInputs()
        self.architecture, self.cluster = inputs.architecture, inputs.cluster
        self.recipe, self.layout_picker = inputs.recipe, inputs.layout
        self.task, self.options = inputs.task, inputs.options
        self.notice = Notice()
        self.notice.add_class("ss-strip")
        self.launch = LaunchButton(
            self.cluster.machine,
            self.task,
            self.options,
            on_launch=self._show_launched,
            on_error=self._show_launch_error,
            on_options=self._show_job_options,
        )
        self.export_panel = ExportPanel()
        self.open_plan = OpenPlan(
            on_open=lambda plan: self._changes.open_plan(self.plan, plan), current=lambda: self.plan
        )
        self._changes = PlanChanges(inputs, self.notice, self.apply)
        self._check_results = CheckResults(self.task)
        self._queues = QueueSearch(self.cluster, self.launch.target)
        below = (self.launch.note, self.export_panel, self.export_panel.words, self.launch.free_place)
        self.folds = {
            "Task": Fold("Task", self.task, self.open_plan),
            "Model": Fold("Model", self.architecture, is_open=True),
            "GPUs": Fold("GPUs", self.cluster),
            "Training": Fold("Training", self.recipe, is_open=True),
            "Framework": Fold("Framework", self.layout_picker),
            "Run": Fold("Run", self.options, self.launch.target.options, *below),
        }
        # An error opens its section, and its fix may set inputs of other sections.
        for fold, picker in zip(self.folds.values(), inputs.all_pickers, strict=True):
            fold.follow_picker(picker)
            picker.on_fix = self._apply_fix
        self.questions = Folds(list(self.folds.values()))
        self.questions.add_class("ss-side")

    def _make_pages(self) -> None:
        """Build the tabs. Each page is filled when first shown, so that a reloaded page has less to load."""
        self.fit_search = FitSearch()
        self.memory = MemoryView(
            on_pin=self._toggle_pin,
            on_apply=lambda plan: self._changes.apply_suggested(self.plan, plan),
            on_fit=self._changes.offer_fit,
            fit_search=self.fit_search,
        )
        self.head = Head(self.fit_search, on_fit=self._changes.offer_fit, launch=self.launch.head)
        self.headline, self.rates, self.fit = self.head.headline, self.head.rates, self.head.fit
        self.tabs = Tabs(TABS)
        self.trace = TracePage(
            TRACE_PIXELS,
            on_apply=lambda plan: self._changes.apply_traced(self.plan, plan),
            on_rates=self._predict_again,
        )
        self.run_events = RunEvents(self.launch, self._queues, self.trace, on_end=self._use_ended_run)
        self._fine_tune = FineTuneTab(
            self._inputs, self.tabs, self.notice, apply=self.apply, current=lambda: self.plan
        )
        self._pages: dict[str, widgets.Box] = {
            "Memory": widgets.VBox([self.memory]),
            **{name: widgets.VBox() for name in ("Time", "Plans", "Checks", FINE_TUNE, "Runs")},
            "Trace": self.trace,
        }
        self._drawers: dict[str, Callable[[], None]] = {
            "Memory": lambda: self.memory.show(self.plan, self._report),
            "Time": lambda: self.time.show(self.plan),
            "Plans": lambda: self.plans.set_plan(self.plan),
            "Checks": self._draw_checks,
            FINE_TUNE: self._draw_finetune,
        }
        # Their numbers are of the last valid plan, and pale while an input is wrong; runs and traces go on.
        for name in ("Memory", "Time", "Plans", "Checks"):
            self._pages[name].add_class("ss-predicted")
        panel = widgets.VBox(list(self._pages.values()), layout=controls.share_layout())
        panel.add_class("ss-panel")
        self._main = widgets.VBox([self.tabs, panel], layout=controls.share_layout())
        self._main.add_class("ss-main")

    def _observe_inputs(self) -> None:
        for picker in self._inputs.plan_pickers:
            picker.observe(self._replan, "value")
            picker.observe(self._follow_error, "is_wrong")
        for picker in (self.task, self.options):
            picker.observe(self._recheck, "value")
        self.architecture.observe(self._change_weights, "weights_folder")
        self.task.observe(self._use_form, "kind")
        self.task.leave_form = self._fine_tune.leave
        self.tabs.observe(self._show_page, "value")
        self.cluster.observe(self._follow_place, "place")
        self.launch.target.observe(self._show_job_error, "is_wrong")
        # What is idle changes: it is read again whenever the question is opened.
        self.folds["GPUs"].head.observe(lambda _: self._queues.start(), "expanded")

    @cached_property
    def time(self) -> StepView:
        """The Time tab's view."""
        view = StepView(machine=self.cluster.machine, on_calibrate=self._show_rates, on_pin=self._toggle_pin)
        view.pins = self.pins
        for plan, steps in self._measured:
            view.add(plan, steps)
        return self._put_on_page("Time", view)

    @cached_property
    def finetune(self) -> FinetunePage:
        """The Fine-tune tab's page."""
        page = self._fine_tune.create_page(self._use_form, self.run_events.report_ended)
        return self._put_on_page(FINE_TUNE, page)

    @cached_property
    def plans(self) -> PlansPage:
        """The Plans tab's page."""
        page = PlansPage(on_apply=lambda plan: self._changes.apply_listed(self.plan, plan))
        return self._put_on_page("Plans", page)

    @cached_property
    def checks(self) -> ChecksView:
        """The Checks tab's view."""
        view = ChecksView(
            on_apply=lambda plan: self._changes.apply_suggested(self.plan, plan),
            on_apply_task=self._apply_task,
        )
        return self._put_on_page("Checks", view, self.script)

    @cached_property
    def script(self) -> ScriptChecks:
        """The checks of the user's own script, shown below those of the plan."""
        return ScriptChecks(self.plan)

    @cached_property
    def runs(self) -> RunsView:
        """The Runs tab's view."""
        view = RunsView(
            on_open_trace=self._open_trace,
            on_end=self.run_events.report_ended,
            on_resume=self._use_resumed_run,
            is_busy=lambda: self.launch.busy,
        )
        # The runs are counted in a thread.
        view.observe(lambda _: call_in_loop(self._loop, self._count_runs), "num_runs")
        return self._put_on_page("Runs", view)

    @property
    def run_view(self) -> RunView:
        """The view of the run that is open in the Runs tab."""
        return self.runs.run_view

    def _put_on_page(self, tab: str, view: Page, *below: widgets.Widget) -> Page:
        self._pages[tab].children = [view, *below]
        return view

    # ---- where runs are launched

    def _follow_place(self, change: dict[str, str]) -> None:
        """Launch where the GPUs are."""
        if change["new"] != ANYWHERE:
            self.launch.target.choose(change["new"])

    def _show_job_options(self) -> None:
        """Open the question Run alone, so that the options are in sight."""
        for name, fold in self.folds.items():
            fold.head.expanded = name == "Run" or (fold.head.wrong and fold.head.expanded)

    def _show_job_error(self, change: object) -> None:
        head = self.folds["Run"].head
        head.wrong = self.launch.target.is_wrong or self.options.is_wrong
        head.expanded |= head.wrong

    # ---- inputs to plan

    def _replan(self, change: object = None) -> None:
        """Build the plan from the pickers; if that fails, keep the last valid plan and show the error."""
        if self._planning:
            return
        self._planning = True
        try:
            plan = self._inputs.build_plan()
        except ValueError as error:
            self._inputs.show_error(error)
            return
        except Exception as error:  # An exception raised in a handler would not be shown.
            self._inputs.show_error(
                ValueError(f"Internal error of Shardscope: {type(error).__name__}: {error}")
            )
            raise
        finally:
            self._planning = False
            self._show_staleness()
        # traitlets does not notify observers of an equal value.
        if plan == self.plan:
            self._offer_launch()  # The weights folder may have changed.
        self.plan = plan

    def apply(self, plan: ss.Plan, weights: Path | None = None) -> None:
        """Set all inputs to match ``plan``, whose model is in the folder ``weights`` if that is given.

        Every change of the plan goes through this method.
        """
        self._planning = True
        try:
            self._inputs.set_plan(plan, weights)
        finally:
            self._planning = False
        self._replan()

    def _apply_fix(self, changes: Mapping[str, object]) -> None:
        """Apply a suggested fix as one update: a single change may be invalid together with old values."""
        self._planning = True
        try:
            self._inputs.set_fields(changes)
        finally:
            self._planning = False
        self._replan()

    @property
    def is_wrong(self) -> bool:
        """Return whether an input is invalid, in which case the plan does not match the inputs."""
        return self._inputs.is_wrong

    def _follow_error(self, change: dict[str, bool]) -> None:
        """Remove an error of the plan when a single input becomes invalid: it is about the value before."""
        if change["new"] and not self._planning:
            self._inputs.clear_plan_errors()
        self._show_staleness()

    def _show_staleness(self, change: object = None) -> None:
        """Dim the last valid plan and disable launching while an input is invalid."""
        wrong = self.is_wrong
        controls.set_class(self, "ss-stale", wrong)
        self.launch.blocked = WRONG_INPUT if wrong else ""
        self.fit.button.disabled = wrong
        self.export_panel.is_blocked = wrong
        self.memory.repairs.freeze(wrong)
        for page in ("plans", "checks", "script"):
            if page in vars(self):
                getattr(self, page).freeze(wrong)

    # ---- plan to views

    @traitlets.observe("plan")
    def _draw_plan(self, change: Mapping[str, object]) -> None:
        plan, report = self.plan, self.plan.memory()
        self._report = report
        self.notice.show_message("")  # The notice was about the previous plan.
        self._verdict = assess_plan(plan, report)
        self._show_head()
        # Let the browser draw the visible part while the slower rest is still computed.
        self._draw_shown()
        self._show_rates()
        self._offer_launch()
        self._fine_tune.name_settings(change["old"])
        self.export_panel.set_plan(plan)
        self._pause.request()

    def _offer_launch(self) -> None:
        self.task.set_plan(self.plan, self.architecture.weights_folder)
        if self._report is not None:
            self.launch.set_plan(self.plan, self._report)
            self._use_form()

    def _change_weights(self, change: object) -> None:
        """Offer to fine-tune from another folder, whose model may be the same."""
        if not self._planning and self._report is not None:
            self._offer_launch()
            self._recheck()

    def _show_head(self) -> None:
        """Show the plan and its verdict; on a Fine-tune tab without a task, that it is not ready."""
        if self._report is None or self._verdict is None:
            return
        if self._fine_tune.lacks_task:
            self.head.show_missing_task(self.plan)
        else:
            self.head.show_plan(self.plan, self._report, self._verdict)

    def _show_rates(self) -> None:
        self.head.show_rates(build_shown_step(self.plan))

    def _draw_shown(self) -> None:
        """Update the visible page; the other pages are updated when they are shown."""
        name = self.tabs.value
        if name in self._drawers and self._report is not None and self._drawn.get(name) is not self.plan:
            self._drawn[name] = self.plan
            self._drawers[name]()

    def _show_page(self, change: object = None) -> None:
        for name, page in self._pages.items():
            page.layout.display = "" if name == self.tabs.value else "none"
        if self.tabs.value == "Runs":
            self.runs.read_folder()
        self._draw_shown()
        self._use_form()
        self._show_staleness()

    def _toggle_pin(self, plan: ss.Plan) -> None:
        """Pin ``plan`` for comparison, or unpin it."""
        remaining = tuple(pin for pin in self.pins if pin != plan)
        self.pins = remaining if len(remaining) < len(self.pins) else (*self.pins, plan)

    @traitlets.observe("pins")
    def _show_pins(self, change: object) -> None:
        # cached_property stores in vars: a view that was never shown is not created here.
        for view in ("memory", "time"):
            if view in vars(self):
                getattr(self, view).pins = self.pins

    # ---- fine-tune

    def _use_form(self, change: object = None) -> None:
        """Follow the Fine-tune tab's form, or leave the task to the inputs while it is not its turn."""
        if self._fine_tune.page is None or self._planning:
            return
        self._fine_tune.use_form()
        self._drawn.pop(FINE_TUNE, None)
        self._draw_shown()
        self._show_head()

    def _draw_finetune(self) -> None:
        self._fine_tune.show_plan(self.finetune, self.launch.current.plan or self.plan)

    # ---- checks

    def _draw_checks(self) -> None:
        self.checks.show(self.findings)
        self.script.set_plan(self.plan)

    @property
    def findings(self) -> list[Finding]:
        """The findings about :attr:`plan`, its task and the earlier runs."""
        return self._check_results.find(self.plan)

    def _recheck(self, change: object = None) -> None:
        """Refresh the findings and the launch offer after the task or the runs, but not the plan, changed."""
        self._check_results.discard()
        self._drawn.pop("Checks", None)
        self.launch.update_offer()
        self._draw_shown()
        self._pause.request()

    def _apply_task(self, task: object) -> None:
        """Set the inputs to ``task``, which a finding suggests."""
        options = self.options
        if isinstance(task, ss.Finetune) and self.task.form is not None:
            settings, now = self.finetune.form.settings, self._build_finetune(self.plan)
            fields = {
                name: getattr(task, name)
                for name in settings.boxes
                if hasattr(task, name) and getattr(now, name, None) != getattr(task, name)
            }

            def set_form() -> None:
                settings.set_fields(fields)
                options.profile.value = task.profile is True

            self._changes.apply_task({**settings.boxes, "profile": options.profile}, set_form)
        elif isinstance(task, ss.Pretrain | ss.Finetune):
            rate = limit_rate(ss.Pretrain.learning_rate, self.plan)
            boxes = {**options.boxes, "profile": options.profile}
            self._changes.apply_task(boxes, lambda: options.set_task(task, rate))

    def _on_pause(self) -> None:
        self._show_recommendations()
        findings = self.findings  # Once: without an event loop, another thread may change the plan.
        worst = sort_worst_first(findings)[0].severity if findings else ""
        self.tabs.set_badge("Checks", len(findings), summarize_findings(findings), worst)
        self._count_runs()

    def _count_runs(self) -> None:
        num_runs = self.runs.num_runs if "runs" in vars(self) else count_runs()
        self.tabs.set_badge("Runs", num_runs, f"{format_count(num_runs, 'run')} in this folder", "")

    def _show_recommendations(self) -> None:
        """Show the recommended settings of a fine-tune on hover of their inputs."""
        task = self._build_finetune(self.plan)
        reasons: dict[str, str] = {}
        if task is not None:
            preview = self.finetune.form.preview_of_data if self.task.form is not None else None
            for choice in recommend(task, self.plan, preview):
                reasons[choice.field] = f"Recommended: {choice.summary}. {choice.why}"
        self.recipe.show_reasons(reasons)
        self.options.show_reasons(reasons)

    def _build_finetune(self, plan: ss.Plan) -> ss.Finetune | None:
        """Return the fine-tune given by the inputs; None for another task, or while an input is wrong."""
        try:
            task = self.task.build_task(plan)
        except ValueError:
            return None
        return task if isinstance(task, ss.Finetune) else None

    # ---- runs

    def _show_launched(self, run: ss.Run, notes: str) -> None:
        """Show a run that the button started."""
        self.run = run
        self.run_events.report_launched(run)
        self.notice.show_message("")
        if "runs" in vars(self):
            self.runs.read_folder()
        self._count_runs()
        if self.task.form is not None:
            self.finetune.watch(run)
            self.tabs.value = FINE_TUNE
            return
        self.runs.open(run)
        self.tabs.value = "Runs"
        if run.status in FINAL:  # The run ended before it was opened: no other event reports its end.
            self.run_events.report_ended(run)

    def _use_resumed_run(self, run: ss.Run) -> None:
        """Handle a run started by Resume like one started by the launch button."""
        self.run = run
        self.run_events.report_resumed(run)

    def _show_launch_error(self, error: Exception, retry: Callable[[], None] | None) -> None:
        """Show why a launch failed, with a button for what would help."""
        actions = {"Launch anyway": retry} if retry else {}
        changes = self._inputs.find_cluster_changes(error) if isinstance(error, FieldError) else {}
        if changes:
            actions[label_changes(changes)] = lambda: self._apply_fix(changes)
        self.notice.show_message(str(error) or type(error).__name__, actions, is_error=True)

    def _use_ended_run(self, measured: MeasuredRun | None) -> None:
        """Compare the plan with a run that has ended, and update the launch button and the checks."""
        self._offer_launch()
        if measured is not None:
            self._show_measured(measured)
        self._check_results.discard_runs()
        self._recheck()

    def _show_measured(self, measured: MeasuredRun) -> None:
        """Show the measurements of a run next to the prediction of its plan."""
        plan, memory, steps = measured
        if memory.peak_bytes:
            self.memory.add(plan, memory)
        if steps is None:
            return
        if "time" in vars(self):
            self.time.add(plan, steps)
        else:
            self._measured.append((plan, steps))

    # ---- traces

    def _open_trace(self, run: ss.Run) -> None:
        self.trace.show_run(run)
        self.tabs.value = "Trace"

    def _predict_again(self) -> None:
        """Show predictions again, whose rates have changed."""
        self._drawn.clear()
        self._show_rates()
        self._draw_shown()
        self._recheck()
