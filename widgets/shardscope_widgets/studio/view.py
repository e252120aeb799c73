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
from shardscope.planner.repairs.make_it_fit import Fit
from shardscope.planner.verdict import Verdict, assess_plan
from shardscope.records.folder import FINAL
from shardscope.training.tasks.choices import recommend
from shardscope_widgets.checks.findings import sort_worst_first, summarize_findings
from shardscope_widgets.checks.script import ScriptChecks
from shardscope_widgets.checks.view import ChecksView
from shardscope_widgets.finetune import FinetunePage
from shardscope_widgets.finetune.setup import Setup
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_calls import (
    Debounced,
    LatestRequest,
    call_in_loop,
    find_running_loop,
)
from shardscope_widgets.kit.fold import Fold, Folds
from shardscope_widgets.kit.notice import Notice
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.tabs import Tabs
from shardscope_widgets.kit.view import View
from shardscope_widgets.memory.fit_search import FitSearch, Result
from shardscope_widgets.memory.repairs import describe_no_fit
from shardscope_widgets.memory.view import MemoryView
from shardscope_widgets.pickers.cluster import ANYWHERE
from shardscope_widgets.pickers.open_plan import OpenPlan
from shardscope_widgets.pickers.schedulers import SCHEDULERS, Queue, find_queues
from shardscope_widgets.plans.page import PlansPage
from shardscope_widgets.run.export_panel import ExportPanel
from shardscope_widgets.run.launch_button import LaunchButton
from shardscope_widgets.run.runs_view import RunsView, count_runs
from shardscope_widgets.run.view import RunView
from shardscope_widgets.studio.head import (
    FitButton,
    FullWindow,
    render_headline,
    render_missing_task,
    render_rates,
    write_fit_question,
)
from shardscope_widgets.studio.inputs import StudioInputs, label_cluster_fix
from shardscope_widgets.studio.measured_run import MeasuredRun, read_measured_run
from shardscope_widgets.time.rows import RunSteps, build_shown_step
from shardscope_widgets.time.view import StepView
from shardscope_widgets.trace import TracePage

FINE_TUNE = "Fine-tune"
TABS = ("Memory", "Time", "Plans", "Checks", FINE_TUNE, "Runs", "Trace")
PAUSE_SECONDS = 0.25
"""Delay after the last input before fixes and findings are computed: both are slower than the rest."""
FIRST_SEARCH_SECONDS = 0.5
"""Delay after the Studio's creation before schedulers are searched."""
TRACE_PIXELS = 340
TRACE_FOLLOWS = "The trace appears here when the run has ended."
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
        self._findings: tuple[ss.Plan, list[Finding]] | None = None
        """The plan, with the findings about it, its task and earlier runs."""
        self._drawn: dict[str, object] = {}
        """Tab -> the plan that its page currently shows."""
        self._formed: ss.Plan | None = None
        """The plan of the Fine-tune tab's form that was applied last."""
        self._before_form: tuple[ss.Plan, Path | None] | None = None
        """The plan that the form replaced, and the folder of its model."""
        self._plan_of_form: ss.Plan | None = None
        """The plan after the form's was applied."""
        self._occupied_by: Path | None = None
        """Folder of the active run of this machine that was launched or resumed here last."""
        self._measured: list[tuple[ss.Plan, RunSteps]] = []
        """Measured steps, stored until the Time view is created."""
        self._loop = find_running_loop()
        """The kernel's, in whose thread the end of a run is handled."""
        self._make_questions()
        self._make_pages()
        self.sheet = Sheet(
            "pickers", "memory", "time", "plans", "checks", "run", "data", "studio", "finetune", "trace"
        )
        body = _create_box(self.questions, self._main, kind="ss-body")
        super().__init__([self.sheet, self._make_head(), self.notice, body])
        for name in ("ss-root", "ss-studio"):
            self.add_class(name)
        self._observe_inputs()
        self._pause = Debounced(self._on_pause, PAUSE_SECONDS)
        self._show_page()
        self._replan()
        self._queue_search = LatestRequest[int, list[Queue]](lambda _: find_queues(), "shardscope-queues")
        self._num_searches = 0
        # Later, so that the Studio is drawn first.
        self._first_search = Debounced(self._search_queues, FIRST_SEARCH_SECONDS)
        self._first_search.request()

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
            on_launch=self._watch_run,
            on_error=self._show_launch_error,
            on_options=self._show_job_options,
        )
        self.export_panel = ExportPanel()
        self.open_plan = OpenPlan(on_open=self._open_plan, current=lambda: self.plan)
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
            on_pin=self._toggle_pin, on_apply=self.apply, on_fit=self._offer_fit, fit_search=self.fit_search
        )
        self.tabs = Tabs(TABS)
        self.trace = TracePage(TRACE_PIXELS, on_apply=self._apply_traced, on_rates=self._predict_again)
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
            FINE_TUNE: self._show_finetune,
        }
        # Their numbers are of the last valid plan, and pale while an input is wrong; runs and traces go on.
        for name in ("Memory", "Time", "Plans", "Checks"):
            self._pages[name].add_class("ss-predicted")
        panel = widgets.VBox(list(self._pages.values()), layout=controls.share_layout())
        panel.add_class("ss-panel")
        self._main = widgets.VBox([self.tabs, panel], layout=controls.share_layout())
        self._main.add_class("ss-main")

    def _make_head(self) -> widgets.Box:
        """Build the header, which is always visible: headline, numbers and buttons."""
        self.headline = controls.create_html("", "ss-headline")
        self.rates = controls.create_html("", "ss-head-rates", layout=widgets.Layout())
        self.fit = FitButton(self.fit_search, on_fit=self._offer_fit)
        return _create_box(
            self.headline, self.rates, self.fit.button, self.launch.head, FullWindow(), kind="ss-head"
        )

    def _observe_inputs(self) -> None:
        for picker in self._inputs.plan_pickers:
            picker.observe(self._replan, "value")
            picker.observe(self._follow_error, "is_wrong")
        for picker in (self.task, self.options):
            picker.observe(self._recheck, "value")
        self.architecture.observe(self._change_weights, "weights_folder")
        self.task.observe(self._use_form, "kind")
        self.task.leave_form = self._leave_form
        self.tabs.observe(self._show_page, "value")
        self.cluster.observe(self._follow_place, "place")
        self.launch.target.observe(self._show_job_error, "is_wrong")
        # What is idle changes: it is read again whenever the question is opened.
        self.folds["GPUs"].head.observe(self._search_queues, "expanded")

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
        """The Fine-tune tab's page, which begins with the plan's model."""
        page = FinetunePage(
            self.cluster.machine,
            on_change=self._use_form,
            on_apply=self._apply_form,
            on_end=self._report_ended,
        )
        page.form.inputs.weights.value = str(self.architecture.weights_folder or "")
        return self._put_on_page(FINE_TUNE, page)

    @cached_property
    def plans(self) -> PlansPage:
        """The Plans tab's page."""
        return self._put_on_page("Plans", PlansPage(on_apply=self.apply))

    @cached_property
    def checks(self) -> ChecksView:
        """The Checks tab's view."""
        view = ChecksView(on_apply=self.apply, on_apply_task=self._apply_task)
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
            on_end=self._report_ended,
            on_resume=self._watch_resumed,
            is_busy=lambda: self.launch.busy,
        )
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

    def _search_queues(self, change: object = None) -> None:
        """Search the queues of schedulers in a thread, if any scheduler is here."""
        if any(scheduler.is_present() for scheduler in SCHEDULERS):
            self._num_searches += 1
            self._queue_search.request(self._num_searches, self._offer_queues)

    def _offer_queues(self, queues: list[Queue] | Exception) -> None:
        # A closed Studio has no comm.
        if self.comm is None or isinstance(queues, Exception):
            return
        if queues or self.cluster.has_queues:
            self.cluster.offer_queues(queues)
            self.launch.target.offer_queues(queues)

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

    def _open_plan(self, plan: ss.Plan) -> None:
        before = self.plan
        self.apply(plan)
        if self.is_wrong:
            message = "Plan opened, but one of its values is invalid: correct the input marked in red."
            self.notice.show_message(message, is_error=True)
        else:
            self.notice.show_message("Plan opened.", {"Undo": lambda: self.apply(before)})

    def _offer_fit(self, before: ss.Plan, fit: Result) -> None:
        """Apply the fit for ``before``; ask first if it changes more than degrees and recomputation."""
        if isinstance(fit, Exception):
            message = f"The search for a plan that fits failed: {type(fit).__name__}: {fit}"
            self.notice.show_message(message, is_error=True)
            return
        if fit is None:
            self.notice.show_message(describe_no_fit(before), is_error=True)
            return
        if self.is_wrong:  # An input was changed during the search.
            return
        question = write_fit_question(before, fit)
        if question is None:
            self._apply_fit(before, fit)
        else:
            message, label = question
            self.notice.show_message(message, {label: lambda: self._apply_fit(before, fit)})

    def _apply_fit(self, before: ss.Plan, fit: Fit) -> None:
        self.apply(fit.plan)
        self.notice.show_message(
            f"Made it fit: {fit.text}.", {"Undo": lambda: self._undo_fit(fit.plan, before)}
        )

    def _undo_fit(self, undone: ss.Plan, before: ss.Plan) -> None:
        """Restore ``before``, and reset the framework of the plan that is undone."""
        self.apply(before)
        self.layout_picker.reset_framework(undone.layout.framework)

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
        (self.add_class if wrong else self.remove_class)("ss-stale")
        self.launch.blocked = "Correct the input marked in red first." if wrong else ""
        self.fit.button.disabled = wrong
        self.export_panel.is_blocked = wrong
        for page in ("plans", "checks", "script"):
            if page in vars(self):
                getattr(self, page).freeze(wrong)

    # ---- plan to views

    @traitlets.observe("plan")
    def _draw_plan(self, change: object) -> None:
        plan, report = self.plan, self.plan.memory()
        self._report = report
        self.notice.show_message("")  # The notice was about the previous plan.
        self._verdict = assess_plan(plan, report)
        self._show_head()
        # Let the browser draw the visible part while the slower rest is still computed.
        self._draw_shown()
        self._show_rates()
        self._offer_launch()
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
        if self._lacks_task:
            self.headline.value = render_missing_task(self.plan)
            self.fit.hide()
        else:
            self.headline.value = render_headline(self.plan, self._report, self._verdict)
            self.fit.show_for_plan(self.plan, self._verdict)
        self._show_or_hide_rates()

    @property
    def _lacks_task(self) -> bool:
        """Return whether the Fine-tune tab is shown and its form leads to no plan."""
        page = vars(self).get("finetune")
        if self.tabs.value != FINE_TUNE or page is None or page.form.setup is not None:
            return False
        # While other data are read, the last plan stays.
        return self._formed is None or not page.form.data_panel.is_reading

    def _show_rates(self) -> None:
        self.rates.value = render_rates(build_shown_step(self.plan))
        self._show_or_hide_rates()

    def _show_or_hide_rates(self) -> None:
        # A rate and a price for a plan that runs out of memory would be misleading.
        lacks = self._verdict is not None and self._verdict.state == "does not fit"
        is_hidden = lacks or self._lacks_task or not self.rates.value
        self.rates.layout.display = "none" if is_hidden else ""

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
        """Plan what the Fine-tune tab's form leads to, and launch its task while it is the form's turn."""
        page = vars(self).get("finetune")
        if page is None or self._planning:
            return
        setup = page.form.setup
        if setup is not None and setup.plan != self._formed:
            self._formed = setup.plan
            if not page.is_following:
                self._apply_setup(setup)
        has_turn = self.tabs.value == FINE_TUNE or (self.task.kind == "finetune" and page.has_data)
        self.task.set_form(page.read_state(self.architecture.weights_folder) if has_turn else None)
        self._drawn.pop(FINE_TUNE, None)
        self._draw_shown()
        self._show_head()

    def _apply_setup(self, setup: Setup) -> None:
        """Apply the plan of the Fine-tune tab's form, and offer to restore the one before it."""
        # While the form is edited, Undo restores the plan before its first change.
        if self._before_form is None or self.plan != self._plan_of_form:
            self._before_form = (self.plan, self.architecture.weights_folder)
        plan, weights = self._before_form
        self.apply(setup.plan, setup.task.weights)
        self._plan_of_form = self.plan
        if self.plan != plan:
            self.notice.show_message(
                "The plan is now the Fine-tune form's.", {"Undo": lambda: self.apply(plan, weights)}
            )

    def _leave_form(self) -> None:
        """Leave the Fine-tune tab, whose form has the task while it is shown."""
        if self.tabs.value == FINE_TUNE:
            self.tabs.value = "Memory"

    def _apply_form(self) -> None:
        self._formed = None
        self._use_form()

    def _show_finetune(self) -> None:
        state = self.finetune.read_state(self.architecture.weights_folder)
        self.finetune.show(state, self.launch.current.plan or self.plan)

    # ---- checks

    def _draw_checks(self) -> None:
        self.checks.show(self.findings)
        self.script.set_plan(self.plan)

    @property
    def findings(self) -> list[Finding]:
        """The findings about :attr:`plan`, its task and the earlier runs."""
        # Findings take longer than a redraw, and both the tab and its badge need them.
        if self._findings is None or self._findings[0] is not self.plan:
            try:
                task = self.task.build_task(self.plan)
            except ValueError:  # The error is shown at its input, and launching is disabled.
                task = None
            self._findings = (self.plan, list(self.plan.findings(task, self._earlier_runs)))
        return self._findings[1]

    @cached_property
    def _earlier_runs(self) -> list[ss.Run]:
        """The runs in this folder, read again when a run of this Studio ends."""
        return list(ss.runs())

    def _recheck(self, change: object = None) -> None:
        """Refresh the findings and the launch offer after the task or the runs, but not the plan, changed."""
        self._findings = None
        self._drawn.pop("Checks", None)
        self.launch.update_offer()
        self._draw_shown()
        self._pause.request()

    def _apply_task(self, task: object) -> None:
        if isinstance(task, ss.Finetune) and self.task.form is not None:
            rate = task.learning_rate
            self.finetune.form.settings.set_fields({"learning_rate": "" if rate is None else f"{rate:g}"})
        elif isinstance(task, ss.Pretrain | ss.Finetune):
            self.options.set_task(task, limit_rate(ss.Pretrain.learning_rate, self.plan))

    def _on_pause(self) -> None:
        self._show_recommendations()
        worst = sort_worst_first(self.findings)[0].severity if self.findings else ""
        self.tabs.set_badge("Checks", len(self.findings), summarize_findings(self.findings), worst)
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

    def _watch_run(self, run: ss.Run, notes: str) -> None:
        """Show a run that the button started."""
        self.run = run
        if run.target:
            self._search_queues()  # Nodes that were idle may be taken.
        elif self.launch.busy:
            self._occupied_by = run.folder
        self.notice.show_message("")
        self.trace.show_hint(TRACE_FOLLOWS)
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
            self._report_ended(run)

    def _watch_resumed(self, run: ss.Run) -> None:
        """Handle a run started by Resume like one started by the launch button."""
        if run.target:
            self._search_queues()
        else:
            self.launch.busy = True
            self._occupied_by = run.folder
        self.run = run
        self.trace.show_hint(TRACE_FOLLOWS)

    def _show_launch_error(self, error: Exception, retry: Callable[[], None] | None) -> None:
        """Show why a launch failed, with a button for what would help."""
        actions = {"Launch anyway": retry} if retry else {}
        changes = self._inputs.find_cluster_changes(error) if isinstance(error, FieldError) else {}
        if changes:
            actions[label_cluster_fix(changes)] = lambda: self._apply_fix(changes)
        self.notice.show_message(str(error) or type(error).__name__, actions, is_error=True)

    def _report_ended(self, run: ss.Run) -> None:
        """Handle the end of a run, which its view reports in a thread of its own."""
        try:
            measured = read_measured_run(run)
        except (OSError, ValueError):  # The run's view reports a folder that cannot be read.
            measured = None
        call_in_loop(self._loop, lambda: self._run_ended(run, measured))

    def _run_ended(self, run: ss.Run, measured: MeasuredRun | None) -> None:
        if self.comm is None:  # The Studio was closed.
            return
        if self._occupied_by in (None, run.folder):
            self._occupied_by = None
            self.launch.busy = False
        if run.target:
            self._search_queues()
        self._offer_launch()
        if measured is not None:
            self._show_measured(measured)
        vars(self).pop("_earlier_runs", None)
        self._recheck()
        self.trace.show_run(run)

    def _show_measured(self, measured: MeasuredRun) -> None:
        """Show the measurements of a run next to the prediction of its plan."""
        plan, memory, steps = measured
        if memory.tensor_bytes:
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

    def _apply_traced(self, plan: ss.Plan) -> None:
        """Apply the change of the traced run's plan that a sentence of its trace suggests."""
        before = self.plan
        self.apply(plan)
        self.notice.show_message("Applied the changed plan of the run.", {"Undo": lambda: self.apply(before)})


def _create_box(*children: widgets.Widget, kind: str) -> widgets.Box:
    box = widgets.Box(list(children), layout=controls.share_layout())
    box.add_class(kind)
    return box
