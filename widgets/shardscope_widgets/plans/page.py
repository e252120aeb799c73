"""The Plans tab: the recommendation for the current plan, and the search over all layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from html import escape
from typing import NamedTuple

import ipywidgets as widgets

import shardscope as ss
from shardscope.frameworks.registry import frameworks
from shardscope.planner.abilities import TITLES
from shardscope.planner.differences import does_the_same
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_work import WorkPanel
from shardscope_widgets.kit.clickable import Clickable, IgnoredError
from shardscope_widgets.kit.display_names import count_devices, name_model
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
from shardscope_widgets.plans.advice_view import AdviceView
from shardscope_widgets.plans.ranking_view import RankingView

LABEL = "Frameworks your team knows"


class FamiliarToggles(Clickable):
    """Toggle buttons; :attr:`names` are those that are on, for ``familiar_with`` of ``ss.recommend``.

    The group is one Tab stop, with arrow keys inside (``data-roving``). The buttons are HTML because
    ipywidgets' own toggle buttons have no ``aria-pressed``.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        """Create the toggles. ``on_change`` is called after each press."""
        self.names: tuple[str, ...] = ()
        self._on_change = on_change
        super().__init__(self._toggle_framework)
        self._draw_toggles()

    def _toggle_framework(self, name: str) -> None:
        if name not in TITLES:
            raise IgnoredError(name)
        # A fixed order: the order of presses does not change the question.
        self.names = tuple(title for title in TITLES if (title in self.names) != (title == name))
        self._draw_toggles()
        self._on_change()

    def _draw_toggles(self) -> None:
        toggles = "".join(_render_toggle(name, title, name in self.names) for name, title in TITLES.items())
        self.value = (
            f"<div class='ss-toggles'><span aria-hidden='true'>{LABEL}</span>"
            f"<div role='group' aria-label='{LABEL}' data-roving>{toggles}</div></div>"
        )


def _render_toggle(name: str, title: str, is_on: bool) -> str:
    # Accelerate launches other frameworks and is never recommended itself.
    tooltip = (
        f"Prefer {title} where another framework would be about as fast"
        if name in frameworks
        else f"Show whether {title} can launch the recommended plan"
    )
    return (
        f"<button type='button' class='ss-act' data-act='{name}' aria-pressed='{str(is_on).lower()}'"
        f" title='{escape(tooltip, quote=True)}'>{escape(title)}</button>"
    )


CHOSEN = {
    "micro_batch_size",
    "recompute",
    "recompute_interval",
    "kernels",
    "attention",
    "loss",
    "lora_rank",
}
"""Recipe fields chosen by advice and search themselves: their values do not change the question."""


class Question(NamedTuple):
    """The inputs of a result, without those that the result itself chooses."""

    architecture: ss.Architecture
    cluster: ss.Cluster
    recipe: tuple[object, ...]
    familiar_with: tuple[str, ...]
    """Frameworks that the team knows; empty for a search, which ranks every framework."""

    @classmethod
    def from_plan(cls, plan: ss.Plan, familiar_with: tuple[str, ...] = ()) -> Question:
        """Return the question to which ``plan`` is a possible answer."""
        recipe = plan.recipe
        values = [getattr(recipe, field.name) for field in fields(recipe) if field.name not in CHOSEN]
        # lora_rank=None is a default rank: it is the same question as that rank in numbers.
        rank = recipe.adapter_rank if recipe.has_adapters else None
        return cls(plan.architecture, plan.cluster, (*values, rank), familiar_with)

    def __str__(self) -> str:
        return f"{name_model(self.architecture)} on {count_devices(self.cluster)}"

    def outdated_by(self, other: Question) -> str:
        """Return a phrase for what a result was computed for, if the current question is ``other``."""
        if self == other:
            return "for another current plan"
        if self._replace(familiar_with=other.familiar_with) == other:
            return "for other frameworks that your team knows"
        return f"for {self}, before an input changed"


class PlansPage(View):
    """Advice and search for the current plan.

    Opening a mode for the first time runs it. After that, a result for other inputs stays, dimmed and with
    disabled buttons, below a line with a button that runs it again. Advice takes less than a second, so it is
    updated immediately if only the familiar frameworks changed, or the plan for the same question.
    """

    def __init__(self, on_apply: Callable[[ss.Plan], None]) -> None:
        self._plan: ss.Plan | None = None
        self._requested_questions: dict[str, Question] = {}
        self._answered_questions: dict[str, Question] = {}
        self._asked_for: ss.Plan | None = None
        self._advised_for: ss.Plan | None = None
        """The current plan of the latest advice request, and that of the advice on display."""
        self._is_frozen = False
        self._is_next = False
        """Whether a toggle was pressed during a request: the next request starts when that one ends."""
        self.mode = controls.create_segments([("Advice", "advice"), ("All layouts", "search")], "Plans")
        self.mode.observe(self._show_mode, "value")
        self.ask = WorkPanel(
            "Update advice",
            "Recommend a plan for the current model, GPUs and training",
            self._start_advice,
        )
        self.search = WorkPanel(
            "Search again",
            "Evaluate every layout, micro-batch and recomputation of every framework",
            self._start_search,
        )
        self.familiar = FamiliarToggles(self._request_advice)
        # Its own layout, because this one is hidden.
        self.familiar.layout = widgets.Layout()
        self.advice = AdviceView(on_apply=on_apply, work=self.ask)
        self.ranking = RankingView(on_apply=on_apply, work=self.search)
        self._panels = {"advice": self.ask, "search": self.search}
        self._views: dict[str, AdviceView | RankingView] = {"advice": self.advice, "search": self.ranking}
        status_texts = [panel.words for panel in self._panels.values()]
        self.about = controls.create_html("", "ss-hint")
        bar = widgets.HBox([self.mode, *self._panels.values(), *status_texts], layout=controls.share_layout())
        bar.add_class("ss-toolbar")
        super().__init__([Sheet("plans"), bar, self.familiar, self.about, *self._views.values()])
        for panel in self._panels.values():
            # A layout of its own: it is hidden together with its mode.
            panel.words.layout = widgets.Layout()
            panel.button.observe(self._handle_busy_change, "disabled")
        controls.add_classes(self, "ss-root", "ss-plans")

    def set_plan(self, plan: ss.Plan) -> None:
        """Set the current plan, and mark results for other inputs as outdated."""
        self._plan = plan
        self._mark_plan()
        self._show_mode()
        self._follow_plan()

    def freeze(self, frozen: bool) -> None:
        """Disable everything while an input is invalid."""
        self._is_frozen = frozen
        self._show_freshness()

    def _show_mode(self, change: object = None) -> None:
        """Show the selected mode, and run it if it never ran."""
        mode = self.mode.value
        for name, panel in self._panels.items():
            for widget in (panel, panel.words, self._views[name]):
                widget.layout.display = "" if name == mode else "none"
        self.familiar.layout.display = "" if mode == "advice" else "none"
        if self._plan is None:
            return
        # Opening a tab is no request to repeat a search that takes seconds, only to run the first one.
        if mode not in self._answered_questions and not self._panels[mode].is_busy:
            (self._start_advice if mode == "advice" else self._start_search)()
        self._show_freshness()

    def _show_freshness(self) -> None:
        """Show whether the result is outdated, with the button to run again only if it is."""
        mode = self.mode.value
        current, answered_question, panel = (
            self._build_question(mode),
            self._answered_questions.get(mode),
            self._panels[mode],
        )
        is_fresh = self._is_fresh(mode)
        self._views[mode].freeze(self._is_frozen or (answered_question is not None and not is_fresh))
        is_next = self._is_next and mode == "advice"
        # A result that is being computed needs no note that the current one is outdated.
        is_on_its_way = panel.button.disabled and (is_next or self._requested_questions.get(mode) == current)
        # Also after an error or Cancel, when there is no result yet.
        panel.show_button(current is not None and not is_fresh and not panel.button.disabled)
        self.about.value = ""
        if current is not None and answered_question is not None and not is_fresh and not is_on_its_way:
            self.about.value = f"Outdated: computed {answered_question.outdated_by(current)}."

    def _is_fresh(self, mode: str) -> bool:
        """Return whether the result is for the current inputs."""
        answered_question = self._answered_questions.get(mode)
        if answered_question is None or answered_question != self._build_question(mode):
            return False
        return mode == "search" or self._is_advised_or_asked(self._advised_for)

    def _is_advised_or_asked(self, requested: ss.Plan | None) -> bool:
        """Return whether the current plan is the recommended one or the one that advice was requested for."""
        plan, advice = self._plan, self.advice.advice
        assert plan is not None
        known = [requested, None if advice is None else advice.plan]
        return any(one is not None and does_the_same(one, plan) for one in known)

    def _follow_plan(self) -> None:
        """Update the advice immediately if the current plan changed but the question did not."""
        is_asked = self._answered_questions.get("advice") == self._build_question("advice")
        if self._plan is not None and is_asked and not self._is_advised_or_asked(self._asked_for):
            self._request_advice()

    def _build_question(self, mode: str) -> Question | None:
        """Return the question that the button would run now."""
        familiar_with = self.familiar.names if mode == "advice" else ()
        return None if self._plan is None else Question.from_plan(self._plan, familiar_with)

    def _request_advice(self) -> None:
        """Request advice now, or when the running request ends."""
        # One request at a time: of several presses during one, only the last state is requested.
        self._is_next = self.ask.is_busy
        self._start_advice()
        self._show_freshness()

    def _handle_busy_change(self, change: dict[str, bool]) -> None:
        # The button's "disabled" is set last when work ends, so that the next request can start from here.
        if change["new"]:
            self._show_freshness()
        elif self._is_next and not self.ask.is_cancelled:
            self._request_advice()
        else:
            self._is_next = False
            self._show_freshness()
            if not self.ask.is_cancelled:
                self._follow_plan()

    def _start_advice(self) -> None:
        plan, question = self._plan, self._build_question("advice")
        if plan is None or question is None or self.ask.is_busy:
            return
        self._requested_questions["advice"], self._asked_for, self._is_next = question, plan, False
        self.advice.ask(
            *_get_inputs(plan),
            question.familiar_with,
            current=plan,
            on_found=lambda: self._store_advice(plan, question),
        )

    def _store_advice(self, plan: ss.Plan, question: Question) -> None:
        self._advised_for = plan
        self._store_answer("advice", question)

    def _start_search(self) -> None:
        plan, question = self._plan, self._build_question("search")
        if plan is None or question is None or self.search.is_busy:
            return
        self._requested_questions["search"] = question
        self.ranking.search(*_get_inputs(plan), on_found=lambda: self._store_answer("search", question))

    def _mark_plan(self) -> None:
        """Mark the current plan in results for its own question."""
        if self._is_fresh("advice"):
            self.advice.mark(self._plan)
        is_searched = self._answered_questions.get("search") == self._build_question("search")
        # A search for other inputs cannot contain the current plan.
        self.ranking.mark(self._plan if is_searched else None)

    def _store_answer(self, mode: str, question: Question) -> None:
        self._answered_questions[mode] = question
        self._mark_plan()
        self._show_freshness()


def _get_inputs(plan: ss.Plan) -> tuple[ss.Architecture, ss.Cluster, ss.Recipe]:
    return plan.architecture, plan.cluster, plan.recipe
