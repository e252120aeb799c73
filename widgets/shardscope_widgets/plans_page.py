"""The Plans tab: what to start with and why, and every layout that there is; both asked in the background."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple

import ipywidgets as widgets

import shardscope as ss
from shardscope_widgets import shared
from shardscope_widgets.advice_view import AdviceView
from shardscope_widgets.ranking_view import RankingView
from shardscope_widgets.words import device_count, title
from shardscope_widgets.work_panel import WorkPanel

CHOSEN = {
    "micro_batch_size",
    "recompute",
    "recompute_interval",
    "kernels",
    "attention",
    "loss",
    "lora_rank",
}
"""Fields of a recipe that advice and search choose, or write out: another value is no other question."""


class Question(NamedTuple):
    """What an answer is to: without what the answer itself chooses."""

    architecture: ss.Architecture
    cluster: ss.Cluster
    asked: tuple[object, ...]

    @classmethod
    def of(cls, plan: ss.Plan) -> Question:
        """The question whose answers ``plan`` may be one of."""
        recipe = plan.recipe
        asked = [getattr(recipe, field.name) for field in fields(recipe) if field.name not in CHOSEN]
        rank = recipe.adapter_rank if recipe.has_adapters else None
        return cls(plan.architecture, plan.cluster, (*asked, rank))

    def __str__(self) -> str:
        return f"{title(self.architecture.name)} on {device_count(self.cluster)}"


class PlansPage(widgets.VBox):
    """Advice and search for the plan that is offered. Nothing is asked anew while a person moves an input.

    The first look at a page asks its question; after that, what was answered for another question stays,
    pale and not to be pressed, until the button is.
    """

    def __init__(self, on_apply: Callable[[ss.Plan], None]) -> None:
        self._plan: ss.Plan | None = None
        self._answered: dict[str, Question] = {}
        self._is_frozen = False
        self.mode = shared.segments([("what to start with", "advice"), ("every layout", "search")], "Plans")
        self.mode.observe(self._look, "value")
        self.ask = WorkPanel(
            "Ask again", "Go through the questions with this model, these GPUs, this training", self._ask
        )
        self.search = WorkPanel(
            "Search again",
            "Evaluate every layout, micro-batch and recomputation of every framework",
            self._search,
        )
        self.advice = AdviceView(on_apply=on_apply, work=self.ask)
        self.ranking = RankingView(on_apply=on_apply, work=self.search)
        self._panels = {"advice": self.ask, "search": self.search}
        self._views: dict[str, AdviceView | RankingView] = {"advice": self.advice, "search": self.ranking}
        bar = widgets.HBox([self.mode, *self._panels.values()], layout=shared.layout())
        bar.add_class("ss-toolbar")
        self._about = shared.html("", "ss-hint")
        words = [panel.words for panel in self._panels.values()]
        super().__init__([bar, self._about, *words, *self._views.values()], layout=shared.layout())
        for panel in self._panels.values():
            panel.words.layout = widgets.Layout()
        self.add_class("ss-plans")

    def offer(self, plan: ss.Plan) -> None:
        """Say which plan is applied; what was answered for other nouns is shown as that."""
        self._plan = plan
        self._mark()
        self._look()

    def freeze(self, frozen: bool) -> None:
        """While an input is wrong: nobody asked for what is shown."""
        self._is_frozen = frozen
        self._say_whose()

    def _look(self, change: object = None) -> None:
        """Show the chosen page, and ask its question if nobody has yet."""
        mode = self.mode.value
        for name, panel in self._panels.items():
            for widget in (panel, panel.words, self._views[name]):
                widget.layout.display = "" if name == mode else "none"
        if self._plan is None:
            return
        if mode not in self._answered and not self._panels[mode].is_busy:
            (self._ask if mode == "advice" else self._search)()
        self._say_whose()

    def _say_whose(self) -> None:
        """Mark an answer to another question as that."""
        mode = self.mode.value
        answered = self._answered.get(mode)
        is_old = answered is not None and self._plan is not None and answered != Question.of(self._plan)
        self._views[mode].freeze(is_old or self._is_frozen)
        again = self._panels[mode].button.description
        self._about.value = (
            f"This was found for {answered}, before something was changed. {again} to apply one of its plans."
            if is_old
            else ""
        )

    def _ask(self) -> None:
        plan = self._plan
        if plan is None:
            return

        self.advice.ask(*_nouns(plan), on_found=lambda: self._got("advice", plan))

    def _search(self) -> None:
        plan = self._plan
        if plan is None:
            return

        self.ranking.search(*_nouns(plan), on_found=lambda: self._got("search", plan))

    def _mark(self) -> None:
        """Mark the plan in the chart and the table, if they answer for its model and GPUs."""
        is_one = self._plan is not None and self._answered.get("search") == Question.of(self._plan)
        self.ranking.mark(self._plan if is_one else None)

    def _got(self, mode: str, plan: ss.Plan) -> None:
        self._answered[mode] = Question.of(plan)
        self._mark()
        self._say_whose()


def _nouns(plan: ss.Plan) -> tuple[ss.Architecture, ss.Cluster, ss.Recipe]:
    return plan.architecture, plan.cluster, plan.recipe
