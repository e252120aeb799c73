"""The view of ``ss.recommend``: a recommended plan, at most two alternatives, and the decision path."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import traitlets

import shardscope as ss
from shardscope.planner.abilities import compute_abilities
from shardscope.planner.advice.advice import Advice
from shardscope.planner.advice.descriptions import name_plan
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_work import Progress, WorkPanel
from shardscope_widgets.kit.clickable import Clickable, IgnoredError
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
from shardscope_widgets.plans.advice_choice import Answer, build_answer
from shardscope_widgets.plans.advice_html import (
    render_alternatives,
    render_applied,
    render_matrix,
    render_path,
    render_recommendation,
)


class AdviceView(View):
    """A recommendation and its alternatives; the decision path and the framework abilities are collapsed.

    :meth:`ask` runs in the background; ``AdviceView(advice)`` shows a result of ``ss.recommend``.
    A button applies a plan: ``on_apply`` receives it, and :attr:`plan` holds it.
    """

    plan = traitlets.Any(allow_none=True, default_value=None, help="The plan that was applied last.")

    def __init__(
        self,
        advice: Advice | None = None,
        *,
        on_apply: Callable[[ss.Plan], None] | None = None,
        work: WorkPanel | None = None,
    ) -> None:
        """Create the view. ``work`` is the progress panel; by default one above the advice."""
        self.advice: Advice | None = None
        self.answer: Answer | None = None
        self._on_screen: ss.Plan | None = None
        self._applied = ""
        """Name of the plan that was applied last, for a view without ``on_apply``."""
        self._on_apply = on_apply
        self.work = work or WorkPanel("Update advice", "Compute the recommendation again")
        own_panel = [] if work else [self.work, self.work.words]
        if own_panel:
            self.work.show_button(False)  # Hidden until advice is requested.
        self.words = Clickable(self._handle_action)
        super().__init__([Sheet("plans"), *own_panel, self.words])
        controls.add_classes(self, "ss-root", "ss-view", "ss-advice")
        if advice is not None:
            self.show(advice)

    def ask(
        self,
        arch: ss.Architecture,
        cluster: ss.Cluster,
        recipe: ss.Recipe,
        familiar_with: Iterable[str] = (),
        *,
        current: ss.Plan | None = None,
        on_found: Callable[[], None] | None = None,
    ) -> None:
        """Call ``ss.recommend`` in the background, show its advice, then call ``on_found``.

        ``current`` is the current plan, which the advice has to improve on. Return immediately; do nothing
        while a request is running. An error of ``ss.recommend`` is shown next to the button.
        """

        def recommend(progress: Progress) -> Advice:
            advice = ss.recommend(arch, cluster, recipe, familiar_with, current=current, progress=progress)
            progress("drawing", 1.0)  # Raises if the user pressed Cancel meanwhile.
            return advice

        def show_advice(advice: Advice) -> None:
            # Set with its advice: until then the view shows the advice for the previous plan.
            self._on_screen = current
            self.show(advice)
            if on_found is not None:
                on_found()

        self.work.show_button(True)
        self.work.start(recommend, show_advice, lambda _, seconds: "")

    def show(self, advice: Advice) -> None:
        """Draw ``advice``."""
        self._check_shown(advice, Advice)
        self.advice = advice
        self._draw_advice()

    def mark(self, plan: ss.Plan | None) -> None:
        """Redraw the advice relative to another current plan, or to none."""
        if plan != self._on_screen:
            self._on_screen = plan
            if self.advice is not None:
                self._draw_advice()

    def freeze(self, frozen: bool) -> None:
        """Disable the buttons while the advice does not match the current plan."""
        self.words.frozen = frozen
        controls.set_class(self, "ss-old", frozen)

    def _draw_advice(self) -> None:
        advice = self.advice
        assert advice is not None
        self.answer = build_answer(advice, self._on_screen)
        self.words.value = (
            render_applied(self._applied)
            + render_recommendation(self.answer)
            + render_alternatives(self.answer.alternatives, nothing_fits=advice.plan is None)
            + render_path(advice, self.answer)
            + _render_support()
        )

    def _handle_action(self, act: str) -> None:
        plan = self._plan_of(act)
        if plan is None:
            raise IgnoredError(act)
        self.plan = plan
        if self._on_apply is None:  # Alone in a cell, nothing else would show that the button was pressed.
            self._applied = self._name_of(act, plan)
            self.mark(plan)
        else:
            self._on_apply(plan)

    def _plan_of(self, act: str) -> ss.Plan | None:
        """Return the plan that a button applies; None for a button of advice that is no longer shown."""
        if self.answer is None:
            return None
        if act == "plan":
            return self.answer.plan
        return next((one.plan for one in self.answer.alternatives if str(one.index) == act), None)

    def _name_of(self, act: str, plan: ss.Plan) -> str:
        """Return the name of what a button applies."""
        alternatives = () if self.answer is None else self.answer.alternatives
        return next((one.name for one in alternatives if str(one.index) == act), name_plan(plan))


@cache
def _render_support() -> str:
    return render_matrix(compute_abilities())
