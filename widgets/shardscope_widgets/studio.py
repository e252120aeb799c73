"""The whole bench: four questions on the left, the plan's answers on the right, one sentence above both.

State flows one way: pickers -> ``studio.plan`` -> views.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import cached_property
from html import escape
from typing import TypeVar

import ipywidgets as widgets
import traitlets

import shardscope as ss
from shardscope.memory.report import MemoryReport
from shardscope.planner.preflight import Finding
from shardscope.planner.room import fits
from shardscope.runs.free_memory import TooLittleFreeError
from shardscope_widgets.checks.script import ScriptChecks
from shardscope_widgets.checks.view import ChecksView, summary, worst_first
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.debounce import Later
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.tabs import Tabs
from shardscope_widgets.kit.view import View
from shardscope_widgets.kit.words import sentence, verdict
from shardscope_widgets.memory.view import MemoryView
from shardscope_widgets.pickers import ArchitecturePicker, ClusterPicker, LayoutPicker, RecipePicker
from shardscope_widgets.plans.page import PlansPage
from shardscope_widgets.run.export_panel import ExportPanel
from shardscope_widgets.run.launch_panel import LaunchPanel
from shardscope_widgets.run.living_runs import LivingRuns
from shardscope_widgets.run.view import RunView
from shardscope_widgets.time.rates import rates
from shardscope_widgets.time.rows import RunSteps, shown_step
from shardscope_widgets.time.view import StepView
from shardscope_widgets.trace import TraceView

TABS = ("Memory", "Time", "Plans", "Checks", "Run", "Trace")
PAUSE_SECONDS = 0.25
"""After so long without a move of an input, the preflight is asked: it takes longer than all the rest, and
the next move would wait for it."""
TRACE_PIXELS = 640
NO_TRACE = "No trace yet: a run that records one shows it here."

Page = TypeVar("Page", bound=widgets.Widget)


class Studio(View):
    """Plan, launch and look inside, in one widget. ``studio.plan`` and ``studio.run`` are what it shows."""

    plan = traitlets.Any(help="The last valid plan.")
    run = traitlets.Any(allow_none=True, default_value=None, help="The last run that was started here.")

    def __init__(self) -> None:
        self.architecture = ArchitecturePicker()
        self.cluster = ClusterPicker()
        self.recipe = RecipePicker()
        self.which = controls.button(
            "Which framework? See the path",
            "ss-link",
            tooltip="Plans: the questions on the way to a framework",
        )
        self.which.on_click(self._show_path)
        self.layout_picker = LayoutPicker(below=self.which)
        self.memory = MemoryView(on_apply=self.apply)
        self.run_view = RunView(on_end=self._run_ended)
        self.living = LivingRuns(self._watch)
        self.launch_panel = LaunchPanel(self.cluster.machine)
        self.export_panel = ExportPanel()
        self.headline = controls.html()
        self.rates = controls.html()
        self.repairs = self.memory.repairs
        head = widgets.Box([self.headline, self.rates], layout=controls.layout())
        head.add_class("ss-head")
        self.tabs = Tabs(TABS)
        self.trace_holder = widgets.VBox([_hint(NO_TRACE)])
        self.trace_holder.add_class("ss-trace-tab")
        memory_page = widgets.VBox([self.memory])
        # What is behind a tab is made when it is first shown: a page that is loaded anew has less to get.
        self._pages: dict[str, widgets.Box] = {
            "Memory": memory_page,
            **{name: widgets.VBox() for name in ("Time", "Plans", "Checks")},
            "Run": widgets.VBox([self.living, self.run_view]),
            "Trace": self.trace_holder,
        }
        self._drawers: dict[str, Callable[[], None]] = {
            "Memory": self._draw_memory,
            "Time": self._draw_time,
            "Plans": self._draw_plans,
            "Checks": self._draw_checks,
        }
        self._drawn: dict[str, ss.Plan] = {}
        """Tab -> the plan that its page shows."""
        self._measured: list[tuple[ss.Plan, RunSteps]] = []
        """Steps of runs, until there is a view to show them."""
        below = (self.launch_panel, self.export_panel, self.export_panel.words)
        side = widgets.VBox([*self._pickers, *below], layout=controls.layout())
        side.add_class("ss-side")
        main = widgets.VBox([self.tabs, *self._pages.values()], layout=controls.layout())
        main.add_class("ss-main")
        body = widgets.Box([side, main], layout=controls.layout())
        body.add_class("ss-body")
        self.sheet = Sheet("pickers", "memory", "time", "plans", "checks", "run")
        super().__init__([self.sheet, head, body])
        self.add_class("ss-root")
        self.add_class("ss-studio")
        for picker in self._pickers:
            picker.observe(self._replan, "value")
            picker.observe(self._show_staleness, "is_wrong")
        for control in self.launch_panel.inputs:
            control.observe(self._recheck, "value")
        self.tabs.observe(self._show_page, "value")
        self.launch_panel.button.on_click(lambda _: self._launch(force=False))
        self._planning = False
        self._pause = Later(self._on_pause, PAUSE_SECONDS)
        self._report: MemoryReport | None = None
        self._found: tuple[ss.Plan, list[Finding]] | None = None
        """The plan, and what was found of it, of the task and of earlier runs."""
        self._show_page()
        self._replan()

    @cached_property
    def time(self) -> StepView:
        """The Time tab's view."""
        view = StepView(machine=self.cluster.machine, on_calibrate=self._show_rates)
        for plan, steps in self._measured:
            view.add(plan, steps)
        return self._put("Time", view)

    @cached_property
    def plans(self) -> PlansPage:
        """The Plans tab's page."""
        return self._put("Plans", PlansPage(on_apply=self.apply))

    @cached_property
    def checks(self) -> ChecksView:
        """The Checks tab's view."""
        view = ChecksView(on_apply=self.apply, on_apply_task=self._apply_task)
        return self._put("Checks", view, self.script)

    @cached_property
    def script(self) -> ScriptChecks:
        """Under them, the checks of a script of the person's own."""
        return ScriptChecks(self.plan, on_apply=self.apply)

    def _show_path(self, _: object) -> None:
        self.plans.mode.value = "advice"
        self.tabs.value = "Plans"
        self.sheet.show()

    def _put(self, tab: str, view: Page, *below: widgets.Widget) -> Page:
        self._pages[tab].children = [view, *below]
        return view

    @property
    def _pickers(self) -> tuple[ArchitecturePicker, ClusterPicker, RecipePicker, LayoutPicker]:
        return self.architecture, self.cluster, self.recipe, self.layout_picker

    def _replan(self, change: object = None) -> None:
        """Make the plan that the pickers describe; while they do not make one, keep the last and say why."""
        if self._planning:
            return
        self._planning = True
        try:
            for picker in self._pickers:
                picker.clear_plan_errors()
            nouns = (self.architecture.value, self.cluster.value, self.recipe.value)
            self.layout_picker.offer(*nouns)
            self.recipe.offer(self.layout_picker.value)
            plan = ss.Plan(*nouns, self.layout_picker.value)
            # A plan that can run may still have no formulas: then there is nothing to show of it.
            plan.memory()
        except ValueError as error:
            self._show_error(error)
            return
        except Exception as error:  # ours to mend: a notebook shows nobody what is only raised
            self._show_error(ValueError(f"Shardscope failed at this: {type(error).__name__}: {error}"))
            raise
        finally:
            self._planning = False
            self._show_staleness()
        self.plan = plan

    def apply(self, plan: ss.Plan) -> None:
        """Set the inputs to what ``plan`` trains, on what, and how: all changes go through them."""
        self._planning = True
        try:
            if plan.cluster != self.plan.cluster or self.cluster.is_wrong:
                self.cluster.fill(plan.cluster)
            if plan.architecture != self.plan.architecture or self.architecture.is_wrong:
                self.architecture.take(plan.architecture)
            # What this framework has and the last one had not must be on offer before it is chosen.
            self.recipe.offer(plan.layout)
            self.recipe.take(plan.recipe)
            nouns = (self.architecture.value, self.cluster.value, self.recipe.value)
            self.layout_picker.take(plan.layout, nouns)
        finally:
            self._planning = False
        self._replan()

    def _show_staleness(self, change: object = None) -> None:
        """While an input is wrong, the last valid picture stays, pale, and nothing can be started."""
        wrong = any(picker.is_wrong for picker in self._pickers)
        (self.add_class if wrong else self.remove_class)("ss-stale")
        self.launch_panel.blocked = "Mend the input marked in red first." if wrong else ""
        self.export_panel.is_blocked = wrong
        for page in ("plans", "checks", "script"):
            if page in vars(self):
                getattr(self, page).freeze(wrong)

    @traitlets.observe("plan")
    def _draw(self, change: object) -> None:
        plan, report = self.plan, self.plan.memory()
        self._report = report
        kind = "ss-fits" if fits(plan, report) else "ss-lacks"
        self.headline.value = (
            f"{sentence(plan)}<div class='ss-verdict {kind}'>{escape(verdict(plan, report))}</div>"
        )
        # The browser draws what is in sight while the rest, which takes longer, is still computed.
        self._draw_shown()
        self._show_rates()
        self.launch_panel.offer(plan, report)
        self.export_panel.offer(plan)
        self._pause.ask()

    def _show_rates(self) -> None:
        self.rates.value = rates(shown_step(self.plan))

    def _draw_shown(self) -> None:
        """Bring the page in sight up to date; all others wait until they are shown."""
        name = self.tabs.value
        if name in self._drawers and self._report is not None and self._drawn.get(name) is not self.plan:
            self._drawn[name] = self.plan
            self._drawers[name]()

    def _draw_memory(self) -> None:
        self.memory.show(self.plan, self._report)

    def _draw_time(self) -> None:
        self.time.show(self.plan)

    def _draw_plans(self) -> None:
        self.plans.offer(self.plan)

    def _draw_checks(self) -> None:
        self.checks.show(self.findings)
        self.script.offer(self.plan)

    @property
    def findings(self) -> list[Finding]:
        """What the preflight has against :attr:`plan`, and against what Launch would train of it."""
        if self._found is None or self._found[0] is not self.plan:
            try:
                task = self.launch_panel.task(self.plan)
            except ValueError:  # It stands at the input, and nothing can be launched.
                task = None
            self._found = (self.plan, list(self.plan.findings(task, self._earlier_runs)))
        return self._found[1]

    @cached_property
    def _earlier_runs(self) -> list[ss.Run]:
        """The runs in this folder, looked for anew when one of this Studio's ends."""
        return list(ss.runs())

    def _recheck(self, change: object = None) -> None:
        """The task or the runs changed, and not the plan."""
        self._found = None
        self._drawn.pop("Checks", None)
        self._draw_shown()
        self._pause.ask()

    def _apply_task(self, task: ss.Pretrain) -> None:
        self.launch_panel.take(task, self.plan)

    def _on_pause(self) -> None:
        worst = worst_first(self.findings)[0].severity if self.findings else ""
        self.tabs.mark("Checks", len(self.findings), summary(self.findings), worst)

    def _show_error(self, error: ValueError) -> None:
        # What is no FieldError begins with its field as well: "Architecture.model_type is ...".
        owner = getattr(error, "field", str(error)).partition(".")[0]
        picker = {
            "Architecture": self.architecture,
            "Cluster": self.cluster,
            "Recipe": self.recipe,
        }.get(owner, self.layout_picker)
        picker.show_plan_error(error)

    def _show_page(self, change: object = None) -> None:
        for name, page in self._pages.items():
            page.layout.display = "" if name == self.tabs.value else "none"
        if self.tabs.value == "Run":
            self.living.look(self.run)
        self._draw_shown()
        self._show_staleness()

    def _watch(self, run: ss.Run) -> None:
        """Show a run that was launched elsewhere; its Stop works as in the notebook that it came from."""
        self.launch_panel.busy = True
        self.run = run
        self._show_trace(_hint("The trace appears here when the run has ended."))
        self.run_view.show(run)
        self.living.look(run)

    def _launch(self, *, force: bool) -> None:
        offer = self.launch_panel.current
        if offer.plan is None:
            return
        task = self.launch_panel.task(offer.plan)
        self.launch_panel.busy = True
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                run = ss.launch(offer.plan, task, outlive_kernel=self.launch_panel.outlive.value, force=force)
        except TooLittleFreeError as error:
            self.launch_panel.busy = False
            self.launch_panel.ask_whether_to_go_on(str(error), lambda: self._launch(force=True))
            return
        except Exception as error:  # a notebook shows nobody what is raised in a handler
            self.launch_panel.busy = False
            self.launch_panel.say(str(error) or type(error).__name__, is_error=True)
            return
        self.run = run
        tight = [str(each.message) for each in warned if issubclass(each.category, RuntimeWarning)]
        notes = [offer.note] * offer.is_rehearsal + tight
        with contextlib.suppress(OSError):  # A disk that is full by now: the run is under way, and is shown.
            run.note = " ".join(notes)
        self._show_trace(_hint("The trace appears here when the run has ended."))
        self.run_view.show(run)
        self.tabs.value = "Run"
        self.sheet.show()

    def _run_ended(self, run: ss.Run) -> None:
        self.launch_panel.busy = False
        self.launch_panel.offer(self.plan, self.plan.memory())
        self._keep_measured(run)
        vars(self).pop("_earlier_runs", None)
        self._recheck()
        try:
            self._show_trace(TraceView(run.trace(), height=TRACE_PIXELS))
        except (ValueError, OSError) as error:
            self._show_trace(_hint(str(error)))

    def _keep_measured(self, run: ss.Run) -> None:
        """Put what the run measured beside the prediction of its own plan."""
        try:
            plan = run.plan
        except ValueError:
            return
        measured = run.memory()
        if measured.tensor_bytes:
            self.memory.add(plan, measured)
        steps = RunSteps.of(run)
        if steps is None:
            return
        if "time" in vars(self):
            self.time.add(plan, steps)
        else:
            self._measured.append((plan, steps))

    def _show_trace(self, view: widgets.Widget) -> None:
        """Put ``view`` into the Trace tab and let go of what was there, a whole trace perhaps."""
        before = self.trace_holder.children
        self.trace_holder.children = [view]
        for old in before:
            old.close()


def _hint(words: str) -> widgets.HTML:
    return controls.html(escape(words), "ss-hint")
