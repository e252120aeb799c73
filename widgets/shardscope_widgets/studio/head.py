"""The Studio's head: the plan, whether it fits, its rate and cost, "Make it fit", the full-window button."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape

import anywidget
import ipywidgets as widgets

import shardscope as ss
from shardscope.core.number_format import format_gib
from shardscope.memory.report import MemoryReport
from shardscope.planner.advice.descriptions import name_plan
from shardscope.planner.repairs.make_it_fit import Fit
from shardscope.planner.repairs.repairs import MAX_TIMES_SLOWER
from shardscope.planner.verdict import Verdict
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.display_names import (
    count_devices,
    describe_devices,
    explain_missing_time,
    name_model,
    name_rate_unit,
)
from shardscope_widgets.kit.front_end import front_end_text
from shardscope_widgets.kit.numbers import format_dollars, format_short
from shardscope_widgets.memory.fit_search import FitSearch, Result
from shardscope_widgets.memory.repairs import name_changes
from shardscope_widgets.memory.verdict_line import render_verdict
from shardscope_widgets.time.rows import ShownStep
from shardscope_widgets.time.table import MODEL_FLOPS, describe_price

FORM_FACTOR = re.compile(r" (SXM|PCIe|OAM)(?= |$)")
NODES = re.compile(r"^[\d,]+ nodes of \d+")
"""Parts left out of the short line; the full name is in the tooltip."""
DASH = "–"


def render_headline(plan: ss.Plan, report: MemoryReport, verdict: Verdict) -> str:
    """Return the plan and its verdict as HTML. Long ones are truncated and show the full text on hover."""
    rank = plan.recipe.adapter_rank
    methods = {"full": "full training", "lora": f"LoRA rank {rank}", "qlora": f"QLoRA rank {rank}"}
    method = methods[plan.recipe.method]
    model, gpus = name_model(plan.architecture), describe_devices(plan.cluster)
    layout = plan.layout.description
    plain = f"{model} on {gpus} with {layout}, {method}, {plan.recipe.precision}"
    short = FORM_FACTOR.sub("", NODES.sub(f"{plan.cluster.num_gpus:,}", gpus))
    # Full training is the rule, and its words would not fit beside the numbers in a window of 1,440 pixels.
    # A method is not broken either: "LoRA rank" at the end of one line and "16" on the next.
    how = "" if plan.recipe.method == "full" else f"<span class='ss-unbroken'>{escape(method)}</span>, "
    # A list may be broken after a comma: what DeepSpeed offloads is longer than a line.
    framework = escape(layout).replace(", ", ",</b> <b>")
    what = (
        f"<b>{escape(model)}</b> on <b>{escape(short)}</b> with <b>{framework}</b>, "
        f"{how}<span class='ss-unbroken'>{escape(plan.recipe.precision)}</span>"
    )
    return (
        f"<div class='ss-what' title='{escape(plain, quote=True)}'>{what}</div>"
        f"{render_verdict(plan, report, verdict)}"
    )


def render_missing_task(plan: ss.Plan) -> str:
    """Return as HTML that the form is incomplete: a verdict would be about the model of ``plan``."""
    model = escape(name_model(plan.architecture))
    return (
        "<div class='ss-what'><b>Not ready to fine-tune</b></div>"
        f"<div class='ss-hint'>{model} at the left stays the plan until the form below is complete.</div>"
    )


def render_rates(shown: ShownStep) -> str:
    """Return three numbers as HTML, each below its unit; a dash has the reason for a missing number.

    CPU ranks have only the known ones: they have no list price, and peak FLOP/s only after a calibration.
    """
    report, reason = shown.report, shown.step.why_no_rates
    units = (f"tokens/s per {name_rate_unit(shown.plan.cluster)}", "MFU", "per M tokens")
    if report is None or reason:
        numbers = [(DASH, unit, reason) for unit in units]
    else:
        cost, mfu = report.cost_per_token, report.mfu
        share = DASH if mfu is None else _format_percent(mfu)
        why_mfu = "the peak FLOP/s in this precision are unknown" if mfu is None else MODEL_FLOPS
        numbers = [
            (format_short(report.tokens_per_second_per_gpu), units[0], "predicted"),
            (share, units[1], why_mfu),
            (DASH if cost is None else format_dollars(1e6 * cost), units[2], describe_price(shown)),
        ]
    if shown.plan.cluster.gpu.vendor == "cpu":
        numbers = [number for number in numbers if number[0] != DASH]
        if not numbers:
            return ""
    return f"<div class='ss-rates'>{''.join(_render_rate(*number) for number in numbers)}</div>"


def _render_rate(value: str, unit: str, why: str) -> str:
    hint = escape(why, quote=True)
    # A dash alone is meaningless to a screen reader.
    reason = f"<span class='ss-off-screen'> {escape(why)}</span>" if value == DASH else ""
    return f"<span class='ss-entry' title='{hint}'><b>{escape(value)}</b> <span>{unit}</span>{reason}</span>"


def _format_percent(share: float) -> str:
    """Return ``39 %``, or ``< 1 %`` for what would round to zero."""
    return f"{100 * share:.0f} %" if share >= 0.005 else "< 1 %"


class FullWindow(anywidget.AnyWidget):
    """A button that lets the enclosing ``ss-root`` fill the browser window, entirely in the front end."""

    _esm = front_end_text("kit/front_end", "full_window.js")

    def __init__(self) -> None:
        super().__init__(layout=controls.share_layout(flex="0 0 auto"))


LABEL = "Make it fit"
SEARCHING = "Searching …"
TOOLTIP = "Search for a plan that fits with few changes, and is fast; Plans may list faster ones"


class FitButton:
    """The button shown while the current plan does not fit; ``on_fit`` receives the plan and its fit."""

    def __init__(self, search: FitSearch, on_fit: Callable[[ss.Plan, Result], None]) -> None:
        self._search, self._on_fit = search, on_fit
        self._plan: ss.Plan | None = None
        self.button = controls.create_button(
            LABEL, "ss-button", "ss-fit-button", tooltip=TOOLTIP, layout=widgets.Layout(display="none")
        )
        self.button.on_click(lambda _: self.start_search())

    def show_for_plan(self, plan: ss.Plan, verdict: Verdict) -> None:
        """Show the button if ``plan`` does not fit."""
        if plan != self._plan:
            self._plan = plan
            self._show_searching(False)
        self.button.layout.display = "" if verdict.state == "does not fit" else "none"

    def hide(self) -> None:
        """Hide the button: there is no plan to make fit."""
        self._plan = None
        self._show_searching(False)
        self.button.layout.display = "none"

    def start_search(self) -> None:
        """Start the search for changes."""
        plan = self._plan
        if plan is not None:
            self._show_searching(True)
            self._search.request(plan, lambda result: self._report_result(plan, result))

    def _report_result(self, plan: ss.Plan, result: Result) -> None:
        # The inputs changed during the search: this result is for an outdated plan.
        if self._plan == plan:
            self._show_searching(False)
            self._on_fit(plan, result)

    def _show_searching(self, is_searching: bool) -> None:
        self.button.description = SEARCHING if is_searching else LABEL
        self.button.disabled = is_searching


class Head(widgets.Box):
    """The line that is always visible: headline, numbers, "Make it fit", ``launch`` and the full window."""

    def __init__(
        self, search: FitSearch, on_fit: Callable[[ss.Plan, Result], None], launch: widgets.Widget
    ) -> None:
        self.headline = controls.create_html("", "ss-headline")
        self.rates = controls.create_html("", "ss-head-rates", layout=widgets.Layout())
        self.fit = FitButton(search, on_fit)
        self._hides_rates = False
        parts = [self.headline, self.rates, self.fit.button, launch, FullWindow()]
        super().__init__(parts, layout=controls.share_layout())
        self.add_class("ss-head")

    def show_plan(self, plan: ss.Plan, report: MemoryReport, verdict: Verdict) -> None:
        """Show the plan and its verdict."""
        self.headline.value = render_headline(plan, report, verdict)
        self.fit.show_for_plan(plan, verdict)
        # A rate and a price for a plan that runs out of memory would be misleading.
        self._hides_rates = verdict.state == "does not fit"
        self._update_rates()

    def show_missing_task(self, plan: ss.Plan) -> None:
        """Show that the Fine-tune tab's form is incomplete."""
        self.headline.value = render_missing_task(plan)
        self.fit.hide()
        self._hides_rates = True
        self._update_rates()

    def show_rates(self, shown: ShownStep) -> None:
        """Show the numbers of a step, unless the plan has no use for them."""
        self.rates.value = render_rates(shown)
        self._update_rates()

    def _update_rates(self) -> None:
        self.rates.layout.display = "none" if self._hides_rates or not self.rates.value else ""


RESULT_FIELDS = ("method", "precision", "optimizer", "quantization", "seq_len", "global_batch_size")
"""Recipe fields that change the training result."""


def write_fit_question(plan: ss.Plan, fit: Fit) -> tuple[str, str] | None:
    """Return the notice and its button label, or None if ``fit`` needs no confirmation."""
    fitting_plan = fit.plan
    memory = f"{format_gib(fitting_plan.memory().peak_bytes)} GiB"
    same_nouns = (plan.architecture, plan.cluster) == (fitting_plan.architecture, fitting_plan.cluster)
    if not same_nouns or any(
        getattr(plan.recipe, name) != getattr(fitting_plan.recipe, name) for name in RESULT_FIELDS
    ):
        devices = count_devices(plan.cluster)
        notice = f"No layout of any framework fits this model and training on {devices}."
        # The advice may have one that offloads to NVMe, on the condition that there is enough.
        if plan.cluster.nvme_bytes is None and plan.cluster.gpu.name != "cpu":
            notice = f"{notice[:-1]} without offload to NVMe, whose size is not known."
        # A search needs the times of plans: without them only changes of this layout were tried.
        unknown = explain_missing_time(plan)
        if unknown:
            notice = f"No change of this layout fits on {devices}, and others were not searched: {unknown}"
        return notice, f"Change {name_changes(plan, fit)}: {memory}"
    if plan.layout.framework == fitting_plan.layout.framework:
        return None
    title = plan.layout.title
    notice = f"No {title} layout fits."
    if fit.own_framework_fits:
        notice = f"Every {title} layout that fits is over {MAX_TIMES_SLOWER:.0f} times slower."
    return notice, f"Use {name_plan(fitting_plan, plan.recipe)}, {memory}"
