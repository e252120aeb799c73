"""Buttons for changes that make a plan fit, or that free memory in a plan that fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

import ipywidgets as widgets

import shardscope as ss
from shardscope.core.number_format import format_gib
from shardscope.memory.report import MemoryReport
from shardscope.planner.differences import Difference, find_differences
from shardscope.planner.memory_needs import find_shortages, fits
from shardscope.planner.repairs.combined_changes import describe_change
from shardscope.planner.repairs.make_it_fit import Fit
from shardscope.planner.repairs.repairs import Repair, predict_seconds
from shardscope.planner.repairs.savings import find_savings, list_changed_fields
from shardscope.planner.verdict import assess_plan
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_calls import Debounced
from shardscope_widgets.kit.display_names import count_devices
from shardscope_widgets.memory.fit_search import FitSearch, Result
from shardscope_widgets.pickers.layout import LABELS as LAYOUT_LABELS
from shardscope_widgets.pickers.layout import VALUE_LABELS
from shardscope_widgets.pickers.recipe_choices import (
    ADVANCED_LABELS,
    CHOICE_LABELS,
    LOSS_LABELS,
    OPEN_LABELS,
)

MAX_CHIPS = 3
PAUSE_SECONDS = 0.25
"""Pause in the user's input before changes are searched: a search takes longer than a redraw."""
SHORT_CHANGES = {
    "Compute the loss in chunks": "Chunked loss",
    "Fuse head and loss": "Fused loss",
    "Optimizer state in 8 bits": "8-bit optimizer",
    "Train adapters over a 4-bit base (QLoRA)": "QLoRA: adapters, 4-bit base",
}
"""Shorter names of changes whose full name would fill a chip."""
LAST_RESORTS = ("method", "precision")
"""Recipe fields that are changed only as a last resort to make a plan fit."""

OnFit = Callable[[ss.Plan, Fit], None]


class RepairsPanel(widgets.VBox):
    """A button that makes the plan fit, and chips for single changes; ``on_apply`` receives the changed plan.

    The buttons are reused: creating new ones at each change of an input would be slow.
    """

    def __init__(
        self,
        on_apply: Callable[[ss.Plan], None],
        on_fit: OnFit | None = None,
        fit_search: FitSearch | None = None,
    ) -> None:
        """Create the panel. ``on_fit`` receives the plan and its fit; by default the fit is applied."""
        self._on_apply = on_apply
        self._on_fit: OnFit = on_fit or (lambda plan, fit: on_apply(fit.plan))
        self.fit_search = fit_search or FitSearch()
        self._chips = [self._make_chip(index) for index in range(MAX_CHIPS)]
        self._repairs: list[Repair] = []
        self._fit: Fit | None = None
        self._requested: tuple[ss.Plan, MemoryReport] | None = None
        self._shown_plan: ss.Plan | None = None
        self._is_frozen = False
        self._pause = Debounced(self._show_requested, PAUSE_SECONDS)
        self.make_it_fit = controls.create_button("Make it fit", "ss-button", layout=widgets.Layout())
        self.make_it_fit.on_click(lambda _: self._apply_fit())
        self.fit_words = controls.create_html()
        self._first_row = widgets.Box([self.make_it_fit, self.fit_words], layout=widgets.Layout())
        self._first_row.add_class("ss-fit")
        self.words = controls.create_html("", "ss-hint")
        self.buttons = widgets.Box(layout=controls.share_layout())
        self._second_row = widgets.Box([self.words, self.buttons], layout=widgets.Layout())
        self.buttons.add_class("ss-chips")
        self._second_row.add_class("ss-room")
        super().__init__([self._first_row, self._second_row], layout=controls.share_layout())
        self.add_class("ss-repairs")
        self._show_chips("")

    def show_repairs_later(self, plan: ss.Plan, report: MemoryReport) -> None:
        """Offer changes of ``plan`` once the user pauses; remove those of another plan immediately."""
        if plan == self._shown_plan:
            return
        self._requested = (plan, report)
        if self._shown_plan is not None:
            self._shown_plan, self._repairs, self._fit = None, [], None
            # In place but disabled: pressed now, they would change the previous plan, and hiding them would
            # move the page.
            self._disable_buttons(True)
        self._pause.request()

    def _show_requested(self) -> None:
        if self._requested is not None:
            self.show_repairs(*self._requested)

    def show_repairs(self, plan: ss.Plan, report: MemoryReport) -> None:
        """Show the changes that make ``plan`` fit, or that free memory in it."""
        self._shown_plan = plan
        if fits(plan, report):
            self._fit, self._repairs = None, find_savings(plan, report)
            self._show_chips("To free memory:" if self._repairs else "")
        else:
            self._fit = None
            fitting = [repair for repair in plan.repairs() if fits(repair.plan, repair.plan.memory())]
            # A change of method or precision changes what is trained: last, however much it frees.
            fitting.sort(
                key=lambda one: not set(LAST_RESORTS).isdisjoint(list_changed_fields(plan, one.plan))
            )
            self._repairs = fitting[:MAX_CHIPS]
            self.fit_words.value = "Searching for a fast plan that fits, with few changes …"
            self._show_chips("Or a single change:" if self._repairs else "", is_short=True)
            self.fit_search.request(plan, lambda result: self._show_fit(plan, result))
        for chip, repair in zip(self._chips, self._repairs, strict=False):
            chip.description = chip.tooltip = describe_repair(plan, repair)
        self._disable_buttons(False)

    def _apply_fit(self) -> None:
        if self._fit is not None and self._shown_plan is not None:
            self._on_fit(self._shown_plan, self._fit)

    def _show_fit(self, plan: ss.Plan, fit: Result) -> None:
        if plan != self._shown_plan:  # The user has switched to another plan meanwhile.
            return
        if isinstance(fit, Exception):
            self.fit_words.value = escape(str(fit) or type(fit).__name__)
            return
        self._fit = fit
        # The words first: the button applies what they say.
        self.fit_words.value = escape(describe_no_fit(plan) if fit is None else describe_fit(plan, fit))
        self.make_it_fit.layout.display = "" if fit is not None else "none"

    def _show_chips(self, heading: str, is_short: bool = False) -> None:
        self.words.value = heading
        self._first_row.layout.display = "" if is_short else "none"
        self.make_it_fit.layout.display = "" if self._fit is not None else "none"
        chips = self._chips[: len(self._repairs)]
        if list(self.buttons.children) != chips:
            self.buttons.children = chips

    def close(self) -> None:
        """Close the chips too: hidden chips are not children."""
        self._shown_plan = None  # A search that finishes later shows nothing.
        for chip in self._chips:
            chip.close()
        super().close()

    def freeze(self, frozen: bool) -> None:
        """Disable the buttons while an input is invalid: a change would replace what the user typed."""
        self._is_frozen = frozen
        # Without a plan shown, they stay disabled until its changes are found.
        self._disable_buttons(self._shown_plan is None)

    def _disable_buttons(self, disabled: bool) -> None:
        for button in (self.make_it_fit, *self._chips):
            button.disabled = disabled or self._is_frozen

    def _make_chip(self, index: int) -> widgets.Button:
        chip = controls.create_button("", "ss-chip")
        chip.on_click(lambda _: self._apply_repair(index))
        return chip

    def _apply_repair(self, index: int) -> None:
        # The second of two quick clicks may arrive when fewer changes are offered.
        if index < len(self._repairs):
            self._on_apply(self._repairs[index].plan)


def describe_repair(plan: ss.Plan, repair: Repair) -> str:
    """Return ``Recompute selectively: −14.8 GiB, 3 % slower``."""
    shortage = find_shortages(plan, plan.memory())
    where = "" if not shortage or shortage[0].name == "GPU memory" else f" of {shortage[0].name} on a node"
    cost = describe_cost(repair.seconds_lost, predict_seconds(plan))
    change = SHORT_CHANGES.get(repair.change, repair.change)
    return f"{change}: −{format_gib(repair.bytes_won)} GiB{where}, {cost}"


def describe_cost(seconds_lost: float, seconds: float) -> str:
    """Return ``3 % slower``, ``1.4x slower``, ``same speed``, ``2 % faster``, ``20x faster`` or
    ``time unknown``."""
    if math.isnan(seconds_lost) or math.isnan(seconds):
        return "time unknown"
    ratio = (seconds + seconds_lost) / seconds
    if ratio >= 1.395:
        return f"{ratio:.1f}x slower"
    # As in the advice: the ratio of steps in the same time.
    if ratio <= 0.5:
        return f"{1 / ratio:.{0 if ratio <= 0.1 else 1}f}x faster"
    share = max(ratio, 1 / ratio) - 1
    if share < 0.005:
        return "same speed"
    return f"{100 * share:.0f} % {'slower' if ratio > 1 else 'faster'}"


def describe_no_fit(plan: ss.Plan) -> str:
    """Return the message for a plan that no combination of changes makes fit."""
    # More CPU ranks would share the memory of the same host.
    more = "" if plan.cluster.gpu.memory_is_shared else "more GPUs or "
    return f"No combination of changes fits on {count_devices(plan.cluster)}: use {more}a smaller model."


def describe_fit(plan: ss.Plan, fit: Fit) -> str:
    """Return ``Tensor parallel 8, recompute full: fits, 61.2 of 79.1 GiB, about 1.4x slower``."""
    report = fit.plan.memory()
    room = f"{format_gib(report.peak_bytes)} of {format_gib(report.usable_bytes)} GiB"
    cost = describe_cost(fit.seconds_lost, predict_seconds(plan))
    about = "" if cost in ("same speed", "time unknown") else "about "
    changes = name_changes(plan, fit)
    state = assess_plan(fit.plan, report).state
    verdict = {"unknown": "fits the GPU (host memory unknown)"}.get(state, state)
    return f"{changes[:1].upper()}{changes[1:]}: {verdict}, {room}, {about}{cost}"


_LABELS = {
    **LAYOUT_LABELS,
    **ADVANCED_LABELS,
    "micro_batch_size": "Micro-batch",
    "global_batch_size": "Global batch",
    "seq_len": "Sequence",
    "recompute": "Recompute",
}


def name_changes(plan: ss.Plan, fit: Fit) -> str:
    """Return the changes of ``fit`` by the names of the inputs: ``micro-batch 1 → 4, offload none → CPU``."""
    differences = find_differences(plan, fit.plan)
    if len(differences) != len(fit.changes):  # The fit is of another plan.
        return fit.text
    return ", ".join(name_difference(one, text) for one, text in zip(differences, fit.changes, strict=True))


def name_plan_changes(before: ss.Plan, after: ss.Plan) -> str:
    """Return how ``after`` differs, by the names of the inputs: ``micro-batch 4 → 1``."""
    texts = describe_change(before, after).changes
    differences = find_differences(before, after)
    return ", ".join(name_difference(one, text) for one, text in zip(differences, texts, strict=True))


def name_difference(difference: Difference, otherwise: str = "") -> str:
    """Return ``micro-batch 1 → 4``; of a field without input ``otherwise``, or the difference's own text."""
    label = _LABELS.get(difference.field)
    if label is None:
        return otherwise or str(difference)
    # "ZeRO stage" keeps its capitals.
    if label.partition(" ")[0][1:].islower():
        label = label[:1].lower() + label[1:]
    # The texts of the dropdowns, where the field has one.
    of_recipe = LOSS_LABELS if difference.field == "loss" else CHOICE_LABELS
    names = VALUE_LABELS.get(difference.field, of_recipe)
    shown = {repr(value): text for value, text in names.items()}
    unset = OPEN_LABELS.get(difference.field, "not set")
    before, after = (
        shown.get(repr(value), f"{value:,}" if type(value) is int else unset if value is None else str(value))
        for value in (difference.before, difference.after)
    )
    return f"{label} {before} → {after}"
