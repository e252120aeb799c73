"""The Plans tab: what to start with and why, and every layout that there is; both asked in the background."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple

import ipywidgets as widgets

import shardscope as ss
from shardscope.planner.abilities import TITLES
from shardscope.planner.advising.words import listed
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_work import WorkPanel
from shardscope_widgets.kit.words import device_count, title
from shardscope_widgets.plans.advice_view import AdviceView
from shardscope_widgets.plans.familiar_frameworks import FamiliarToggles
from shardscope_widgets.plans.ranking_view import RankingView

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
    familiar_with: tuple[str, ...]
    """What the team runs well; a search asks for every layout, whoever is to run it."""

    @classmethod
    def of(cls, plan: ss.Plan, familiar_with: tuple[str, ...] = ()) -> Question:
        """The question whose answers ``plan`` may be one of."""
        recipe = plan.recipe
        asked = [getattr(recipe, field.name) for field in fields(recipe) if field.name not in CHOSEN]
        rank = recipe.adapter_rank if recipe.has_adapters else None
        return cls(plan.architecture, plan.cluster, (*asked, rank), familiar_with)

    def __str__(self) -> str:
        return f"{title(self.architecture.name)} on {device_count(self.cluster)}"

    def is_but_for_the_team(self, other: Question) -> bool:
        """Whether ``other`` is the same, asked for a team that runs something else well."""
        return self != other and self._replace(familiar_with=other.familiar_with) == other

    def beside(self, other: Question) -> str:
        """What an answer to this question was found for, to somebody who asks ``other``."""
        if not self.is_but_for_the_team(other):
            return f"for {self}, before something was changed"
        if not self.familiar_with:
            return "before you said what your team runs well"
        return f"for a team that runs {listed([TITLES[name] for name in self.familiar_with])} well"


class PlansPage(widgets.VBox):
    """Advice and search for the plan that is offered. Nothing is asked anew while a person moves an input.

    The first look at a page asks its question; after that, what was answered for another question stays,
    pale and not to be pressed, until the button is. Only what the team runs well, an input of advice alone,
    asks at once.
    """

    def __init__(self, on_apply: Callable[[ss.Plan], None]) -> None:
        self._plan: ss.Plan | None = None
        self._asked: dict[str, Question] = {}
        self._answered: dict[str, Question] = {}
        self._is_frozen = False
        self._is_next = False
        """Whether a toggle was pressed while advice was asked: it is asked once that is done."""
        self.mode = controls.segments([("what to start with", "advice"), ("every layout", "search")], "Plans")
        self.mode.observe(self._look, "value")
        self.ask = WorkPanel(
            "Ask again", "Go through the questions with this model, these GPUs, this training", self._ask
        )
        self.search = WorkPanel(
            "Search again",
            "Evaluate every layout, micro-batch and recomputation of every framework",
            self._search,
        )
        self.familiar = FamiliarToggles(self._ask_at_once)
        # Not the layout that all share: this one is hidden.
        self.familiar.layout = widgets.Layout()
        self.advice = AdviceView(on_apply=on_apply, work=self.ask)
        self.ranking = RankingView(on_apply=on_apply, work=self.search)
        self._panels = {"advice": self.ask, "search": self.search}
        self._views: dict[str, AdviceView | RankingView] = {"advice": self.advice, "search": self.ranking}
        bar = widgets.HBox([self.mode, *self._panels.values()], layout=controls.layout())
        bar.add_class("ss-toolbar")
        self._about = controls.html("", "ss-hint")
        words = [panel.words for panel in self._panels.values()]
        parts = [bar, self.familiar, self._about, *words, *self._views.values()]
        super().__init__(parts, layout=controls.layout())
        for panel in self._panels.values():
            panel.words.layout = widgets.Layout()
            panel.button.observe(self._begun_or_ended, "disabled")
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
        self.familiar.layout.display = "" if mode == "advice" else "none"
        if self._plan is None:
            return
        if mode not in self._answered and not self._panels[mode].is_busy:
            (self._ask if mode == "advice" else self._search)()
        self._say_whose()

    def _say_whose(self) -> None:
        """Mark an answer to another question as that."""
        mode = self.mode.value
        asked, answered = self._question(mode), self._answered.get(mode)
        is_old = asked is not None and answered is not None and answered != asked
        self._views[mode].freeze(is_old or self._is_frozen)
        button = self._panels[mode].button
        # Nothing is left to press while it is asked, and the words of that stand there.
        is_next = self._is_next and mode == "advice"
        is_on_its_way = button.disabled and (is_next or self._asked.get(mode) == asked)
        self._about.value = (
            f"This was found {answered.beside(asked)}. {button.description} to apply one of its plans."
            if is_old and not is_on_its_way
            else ""
        )

    def _question(self, mode: str) -> Question | None:
        """What the button would ask now."""
        familiar_with = self.familiar.names if mode == "advice" else ()
        return None if self._plan is None else Question.of(self._plan, familiar_with)

    def _ask_at_once(self) -> None:
        """While something is asked already, mark what is there: the next question waits for its end."""
        self._is_next = self.ask.is_busy
        self._ask()
        self._say_whose()

    def _begun_or_ended(self, change: dict[str, bool]) -> None:
        if change["new"]:
            self._say_whose()
        elif self._is_next and not self.ask.is_cancelled:
            self._ask_at_once()
        else:
            self._is_next = False
            self._say_whose()

    def _ask(self) -> None:
        plan, question = self._plan, self._question("advice")
        if plan is None or question is None or self.ask.is_busy:
            return
        self._asked["advice"], self._is_next = question, False
        known = question.familiar_with
        self.advice.ask(*_nouns(plan), known, on_found=lambda: self._got("advice", question))

    def _search(self) -> None:
        plan, question = self._plan, self._question("search")
        if plan is None or question is None or self.search.is_busy:
            return
        self._asked["search"] = question
        self.ranking.search(*_nouns(plan), on_found=lambda: self._got("search", question))

    def _mark(self) -> None:
        """Mark the plan in the chart and the table, if they answer for its model and GPUs."""
        question = self._question("search")
        is_one = question is not None and self._answered.get("search") == question
        self.ranking.mark(self._plan if is_one else None)

    def _got(self, mode: str, question: Question) -> None:
        self._answered[mode] = question
        self._mark()
        self._say_whose()


def _nouns(plan: ss.Plan) -> tuple[ss.Architecture, ss.Cluster, ss.Recipe]:
    return plan.architecture, plan.cluster, plan.recipe
