"""The Plans tab: one recommendation for the plan on screen, and the search over all layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple

import ipywidgets as widgets

import shardscope as ss
from shardscope.planner.differences import does_the_same
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_work import WorkPanel
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
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
"""Recipe fields that advice and search choose themselves: another value of them is the same question."""


class Question(NamedTuple):
    """The inputs of an answer, without those that the answer itself chooses."""

    architecture: ss.Architecture
    cluster: ss.Cluster
    recipe: tuple[object, ...]
    familiar_with: tuple[str, ...]
    """Frameworks that the team knows; empty for a search, which ranks every framework."""

    @classmethod
    def of(cls, plan: ss.Plan, familiar_with: tuple[str, ...] = ()) -> Question:
        """Return the question to which ``plan`` is a possible answer."""
        recipe = plan.recipe
        asked = [getattr(recipe, field.name) for field in fields(recipe) if field.name not in CHOSEN]
        rank = recipe.adapter_rank if recipe.has_adapters else None
        return cls(plan.architecture, plan.cluster, (*asked, rank), familiar_with)

    def __str__(self) -> str:
        return f"{title(self.architecture.name)} on {device_count(self.cluster)}"

    def outdated_by(self, other: Question) -> str:
        """Return what an answer to this question is for, as a phrase, for a user who now asks ``other``."""
        if self == other:
            return "for another plan on screen"
        if self._replace(familiar_with=other.familiar_with) == other:
            return "for other frameworks that your team knows"
        return f"for {self}, before an input changed"


class PlansPage(View):
    """Advice and search for the plan on screen.

    The first look at a mode asks its question. After that, an answer to another question stays, pale and
    without working buttons, under a line with one button that asks again. Advice is asked for again at once
    where only the frameworks that the team knows changed, or the plan on screen, with the same question: it
    takes less than a second.
    """

    def __init__(self, on_apply: Callable[[ss.Plan], None]) -> None:
        self._plan: ss.Plan | None = None
        self._asked: dict[str, Question] = {}
        self._answered: dict[str, Question] = {}
        self._asked_for: ss.Plan | None = None
        self._advised_for: ss.Plan | None = None
        """The plan on screen when advice was last asked for, and when the advice that is shown was."""
        self._is_frozen = False
        self._is_next = False
        """Whether a toggle was pressed during a question: the next one starts when that has ended."""
        self.mode = controls.segments([("Advice", "advice"), ("All layouts", "search")], "Plans")
        self.mode.observe(self._look, "value")
        self.ask = WorkPanel(
            "Update the advice", "Ask for advice on the model, GPUs and training on screen", self._ask
        )
        self.search = WorkPanel(
            "Search again",
            "Evaluate every layout, micro-batch and recomputation of every framework",
            self._search,
        )
        self.familiar = FamiliarToggles(self._ask_at_once)
        # A layout of its own: this one is hidden.
        self.familiar.layout = widgets.Layout()
        self.advice = AdviceView(on_apply=on_apply, work=self.ask)
        self.ranking = RankingView(on_apply=on_apply, work=self.search)
        self._panels = {"advice": self.ask, "search": self.search}
        self._views: dict[str, AdviceView | RankingView] = {"advice": self.advice, "search": self.ranking}
        words = [panel.words for panel in self._panels.values()]
        self.about = controls.html("", "ss-hint")
        bar = widgets.HBox([self.mode, *self._panels.values(), *words], layout=controls.layout())
        bar.add_class("ss-toolbar")
        super().__init__([Sheet("plans"), bar, self.familiar, self.about, *self._views.values()])
        for panel in self._panels.values():
            panel.words.layout = widgets.Layout()
            panel.button.observe(self._begun_or_ended, "disabled")
        for name in ("ss-root", "ss-plans"):
            self.add_class(name)

    def offer(self, plan: ss.Plan) -> None:
        """Show which plan is on screen, and mark answers to other questions as outdated."""
        self._plan = plan
        self._mark()
        self._look()
        self._follow_plan()

    def freeze(self, frozen: bool) -> None:
        """Disable everything while an input is wrong."""
        self._is_frozen = frozen
        self._show_freshness()

    def _look(self, change: object = None) -> None:
        """Show the chosen mode, and ask its question if that was never asked."""
        mode = self.mode.value
        for name, panel in self._panels.items():
            for widget in (panel, panel.words, self._views[name]):
                widget.layout.display = "" if name == mode else "none"
        self.familiar.layout.display = "" if mode == "advice" else "none"
        if self._plan is None:
            return
        if mode not in self._answered and not self._panels[mode].is_busy:
            (self._ask if mode == "advice" else self._search)()
        self._show_freshness()

    def _show_freshness(self) -> None:
        """Say so where the answer is for another question, and offer the button only then."""
        mode = self.mode.value
        asked, answered, panel = self._question(mode), self._answered.get(mode), self._panels[mode]
        is_fresh = self._is_fresh(mode)
        self._views[mode].freeze(self._is_frozen or (answered is not None and not is_fresh))
        is_next = self._is_next and mode == "advice"
        is_on_its_way = panel.button.disabled and (is_next or self._asked.get(mode) == asked)
        # Also after an error or Cancel, where there is no answer yet.
        panel.offer(asked is not None and not is_fresh and not panel.button.disabled)
        self.about.value = ""
        if asked is not None and answered is not None and not is_fresh and not is_on_its_way:
            self.about.value = f"This was found {answered.outdated_by(asked)}."

    def _is_fresh(self, mode: str) -> bool:
        """Return whether the answer is for what is on screen."""
        answered = self._answered.get(mode)
        if answered is None or answered != self._question(mode):
            return False
        return mode == "search" or self._is_advised_or_asked(self._advised_for)

    def _is_advised_or_asked(self, asked: ss.Plan | None) -> bool:
        """Return whether the plan on screen is the recommended one, or the one that advice was asked for."""
        plan, advice = self._plan, self.advice.advice
        assert plan is not None
        known = [asked, None if advice is None else advice.plan]
        return any(one is not None and does_the_same(one, plan) for one in known)

    def _follow_plan(self) -> None:
        """Ask for advice at once where the plan on screen changed, and the question did not."""
        is_asked = self._answered.get("advice") == self._question("advice")
        if self._plan is not None and is_asked and not self._is_advised_or_asked(self._asked_for):
            self._ask_at_once()

    def _question(self, mode: str) -> Question | None:
        """Return what the button would ask now."""
        familiar_with = self.familiar.names if mode == "advice" else ()
        return None if self._plan is None else Question.of(self._plan, familiar_with)

    def _ask_at_once(self) -> None:
        """Ask for advice now, or when the question that is under way has ended."""
        self._is_next = self.ask.is_busy
        self._ask()
        self._show_freshness()

    def _begun_or_ended(self, change: dict[str, bool]) -> None:
        if change["new"]:
            self._show_freshness()
        elif self._is_next and not self.ask.is_cancelled:
            self._ask_at_once()
        else:
            self._is_next = False
            self._show_freshness()
            if not self.ask.is_cancelled:
                self._follow_plan()

    def _ask(self) -> None:
        plan, question = self._plan, self._question("advice")
        if plan is None or question is None or self.ask.is_busy:
            return
        self._asked["advice"], self._asked_for, self._is_next = question, plan, False
        self.advice.ask(
            *_nouns(plan),
            question.familiar_with,
            current=plan,
            on_found=lambda: self._got_advice(plan, question),
        )

    def _got_advice(self, plan: ss.Plan, question: Question) -> None:
        self._advised_for = plan
        self._got("advice", question)

    def _search(self) -> None:
        plan, question = self._plan, self._question("search")
        if plan is None or question is None or self.search.is_busy:
            return
        self._asked["search"] = question
        self.ranking.search(*_nouns(plan), on_found=lambda: self._got("search", question))

    def _mark(self) -> None:
        """Mark the plan on screen in the answers to its own question."""
        if self._is_fresh("advice"):
            self.advice.mark(self._plan)
        is_searched = self._answered.get("search") == self._question("search")
        self.ranking.mark(self._plan if is_searched else None)

    def _got(self, mode: str, question: Question) -> None:
        self._answered[mode] = question
        self._mark()
        self._show_freshness()


def _nouns(plan: ss.Plan) -> tuple[ss.Architecture, ss.Cluster, ss.Recipe]:
    return plan.architecture, plan.cluster, plan.recipe
