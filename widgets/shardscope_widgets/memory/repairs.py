"""Changes that make a plan fit, or that win room in one that does, as buttons."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import fields
from html import escape

import ipywidgets as widgets

import shardscope as ss
from shardscope.memory.report import MemoryReport
from shardscope.memory.words import gib
from shardscope.planner.changes import ladders
from shardscope.planner.make_it_fit import Fit, make_it_fit
from shardscope.planner.repairs import Repair
from shardscope.planner.room import fits, shortages
from shardscope.planner.verdict import assess
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.debounce import Later

MAX_CHIPS = 3
PAUSE_SECONDS = 0.25
"""Pause in the user's input after which changes are searched: a search takes longer than a redraw."""
LEAST_SHARE_WON = 0.01
"""Share of the GPU's usable bytes that a change of a plan that fits has to win."""
MOST_SHARE_LOST = 0.15
"""Share of the step's seconds that it may cost."""
SHORT_CHANGES = {
    "Compute the loss in chunks": "Chunked loss",
    "Fuse head and loss": "Fused loss",
    "Optimizer state in 8 bits": "8-bit optimizer",
    "Train adapters over a 4-bit base (QLoRA)": "QLoRA: adapters, 4-bit base",
}
"""Words of changes that would fill a chip."""
LAST_RESORTS = ("method", "precision")
"""Recipe fields that are changed last to make a plan fit."""
SAME_TRAINING = ("method", "precision", "optimizer", "micro_batch_size", "global_batch_size", "seq_len")
"""Recipe fields that a change of a plan that fits leaves alone: nobody asked for other training."""


class RepairsPanel(widgets.VBox):
    """One button that makes the plan fit, and chips for single changes; ``on_apply`` gets the changed plan.

    The same buttons are used again and again: new ones at each change of an input would be slow.
    """

    def __init__(self, on_apply: Callable[[ss.Plan], None]) -> None:
        self._on_apply = on_apply
        self._chips = [self._make_chip(index) for index in range(MAX_CHIPS)]
        self._repairs: list[Repair] = []
        self._fit: Fit | None = None
        self._asked: tuple[ss.Plan, MemoryReport] | None = None
        self._offered: ss.Plan | None = None
        self._wanted: ss.Plan | None = None
        """The plan that the thread searches next."""
        self._lock = threading.Lock()
        self.is_searching = False
        self._pause = Later(self._offer_asked, PAUSE_SECONDS)
        self.make_it_fit = controls.button(
            "Make it fit", "ss-button", "ss-make-it-fit", layout=widgets.Layout()
        )
        self.make_it_fit.on_click(lambda _: None if self._fit is None else self._on_apply(self._fit.plan))
        self.fit_words = controls.html()
        self._first_row = widgets.Box([self.make_it_fit, self.fit_words], layout=widgets.Layout())
        self._first_row.add_class("ss-fit")
        self.words = controls.html("", "ss-hint")
        self.buttons = widgets.Box(layout=controls.layout())
        self._second_row = widgets.Box([self.words, self.buttons], layout=widgets.Layout())
        self.buttons.add_class("ss-chips")
        self._second_row.add_class("ss-room")
        super().__init__([self._first_row, self._second_row], layout=controls.layout())
        self.add_class("ss-repairs")
        self._show("")

    def offer_soon(self, plan: ss.Plan, report: MemoryReport) -> None:
        """Offer changes of ``plan`` once the user pauses; those of another plan go away at once."""
        if plan == self._offered:
            return
        self._asked = (plan, report)
        if self._offered is not None:
            self._offered, self._repairs, self._fit = None, [], None
            self._freeze(True)
        self._pause.ask()

    def _offer_asked(self) -> None:
        if self._asked is not None:
            self.offer(*self._asked)

    def offer(self, plan: ss.Plan, report: MemoryReport) -> None:
        """Show what makes ``plan`` fit, or what wins room in it."""
        self._offered = plan
        if fits(plan, report):
            self._fit, self._repairs = None, find_room(plan, report)
            self._show("Make room:" if self._repairs else "")
        else:
            self._fit = None
            enough = [one for one in plan.repairs() if fits(one.plan, one.plan.memory())]
            enough.sort(key=lambda one: not set(LAST_RESORTS).isdisjoint(_changed_fields(plan, one.plan)))
            self._repairs = enough[:MAX_CHIPS]
            self.fit_words.value = "Looking for the cheapest changes that make it fit …"
            self._show("Or one change:" if self._repairs else "", is_short=True)
            self._search(plan)
        for chip, repair in zip(self._chips, self._repairs, strict=False):
            chip.description = chip.tooltip = chip_words(plan, repair)
        self._freeze(False)

    def _search(self, plan: ss.Plan) -> None:
        """Search the cheapest combination in a thread, which goes on with the plan asked about last."""
        with self._lock:
            self._wanted = plan
            if self.is_searching:
                return
            self.is_searching = True
        threading.Thread(target=self._search_wanted, daemon=True, name="shardscope-make-it-fit").start()

    def _search_wanted(self) -> None:
        while True:
            with self._lock:
                plan, self._wanted = self._wanted, None
                if plan is None:
                    self.is_searching = False
                    return
            try:
                self._show_fit(plan, make_it_fit(plan))
            except Exception as error:  # a notebook shows nobody what is raised in a thread
                self.fit_words.value = escape(str(error) or type(error).__name__)

    def _show_fit(self, plan: ss.Plan, fit: Fit | None) -> None:
        if plan != self._offered:  # Meanwhile the user went on to another plan.
            return
        self._fit = fit
        self.make_it_fit.layout.display = "" if fit is not None else "none"
        self.fit_words.value = (
            "Nothing that can be changed makes it fit: use more GPUs or a smaller model."
            if fit is None
            else escape(fit_words(plan, fit))
        )

    def _show(self, words: str, is_short: bool = False) -> None:
        self.words.value = words
        self._first_row.layout.display = "" if is_short else "none"
        self.make_it_fit.layout.display = "" if self._fit is not None else "none"
        chips = self._chips[: len(self._repairs)]
        if list(self.buttons.children) != chips:
            self.buttons.children = chips

    def close(self) -> None:
        """Close the chips too: those that are not offered are no children."""
        self._offered = None  # What a search still finds is nobody's.
        for chip in self._chips:
            chip.close()
        super().close()

    def _freeze(self, frozen: bool) -> None:
        for button in (self.make_it_fit, *self._chips):
            button.disabled = frozen

    def _make_chip(self, index: int) -> widgets.Button:
        chip = controls.button("", "ss-chip")
        chip.on_click(lambda _: self._apply(index))
        return chip

    def _apply(self, index: int) -> None:
        # Of two quick clicks, the second may come when fewer changes are on offer.
        if index < len(self._repairs):
            self._on_apply(self._repairs[index].plan)


def find_room(plan: ss.Plan, report: MemoryReport) -> list[Repair]:
    """Return single changes that win room in a plan that fits, at little cost, most bytes first.

    Of each field of the recipe, the cheapest change. None of them changes what is trained or the layout.
    """
    seconds = _seconds(plan)
    best: dict[str, Repair] = {}
    for ladder in ladders(plan):
        for change in ladder:
            changed = _changed_fields(plan, change.plan)
            if len(changed) != 1 or changed[0] in SAME_TRAINING or change.plan.layout != plan.layout:
                continue
            try:
                after = change.plan.memory()
            except ValueError:  # a plan that can run, but that no formula covers
                continue
            won = report.peak_bytes - after.peak_bytes
            if won < LEAST_SHARE_WON * report.usable_bytes or not fits(change.plan, after):
                continue
            lost = _seconds(change.plan) - seconds
            if lost > MOST_SHARE_LOST * seconds:
                continue
            repair = Repair(change.words, change.plan, won, lost)
            known = best.get(changed[0])
            if known is None or _cost(repair, seconds) < _cost(known, seconds):
                best[changed[0]] = repair
    return sorted(best.values(), key=lambda repair: -repair.bytes_won)[:MAX_CHIPS]


def _changed_fields(before: ss.Plan, after: ss.Plan) -> list[str]:
    recipes = before.recipe, after.recipe
    names = [field.name for field in fields(before.recipe)]
    return [name for name in names if getattr(recipes[0], name) != getattr(recipes[1], name)]


def _cost(repair: Repair, seconds: float) -> tuple[float, int]:
    """Order changes by per cent of time lost, then by bytes won."""
    share = repair.seconds_lost / seconds
    return (math.inf if math.isnan(share) else max(0, round(100 * share)), -repair.bytes_won)


def _seconds(plan: ss.Plan) -> float:
    """Return the seconds of one step; NaN where they cannot be predicted."""
    try:
        return plan.step().seconds
    except ValueError:
        return math.nan


def chip_words(plan: ss.Plan, repair: Repair) -> str:
    """Return ``Recompute selectively: −14.8 GiB, 3 % slower``."""
    short = shortages(plan, plan.memory())
    where = "" if not short or short[0].name == "GPU memory" else f" of {short[0].name} on a node"
    cost = cost_words(repair.seconds_lost, _seconds(plan))
    change = SHORT_CHANGES.get(repair.change, repair.change)
    return f"{change}: −{gib(repair.bytes_won)} GiB{where}, {cost}"


def cost_words(seconds_lost: float, seconds: float) -> str:
    """Return ``3 % slower``, ``1.4x slower``, ``as fast``, ``2 % faster``, ``time not known``."""
    if math.isnan(seconds_lost) or math.isnan(seconds):
        return "time not known"
    share = seconds_lost / seconds
    if abs(share) < 0.005:
        return "as fast"
    if share >= 0.395:
        return f"{1 + share:.1f}x slower"
    return f"{abs(share):.0%} {'slower' if share > 0 else 'faster'}".replace("%", " %")


def fit_words(plan: ss.Plan, fit: Fit) -> str:
    """Return ``Tensor parallel 8, recompute full: fits, 61.2 of 79.1 GiB, about 1.4x slower``."""
    report = fit.plan.memory()
    room = f"{gib(report.peak_bytes)} of {gib(report.usable_bytes)} GiB"
    cost = cost_words(fit.seconds_lost, _seconds(plan))
    about = "" if cost in ("as fast", "time not known") else "about "
    changes = ", ".join(fit.changes)
    state = assess(fit.plan, report).state
    verdict = {"unknown": "fits the GPU, the node's memory is not known"}.get(state, state)
    return f"{changes[:1].upper()}{changes[1:]}: {verdict}, {room}, {about}{cost}"
