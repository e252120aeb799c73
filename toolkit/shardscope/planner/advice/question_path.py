"""State of the questions of advice: the turns so far, and the plan that they led to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardscope.frameworks.registry import is_trained
from shardscope.planner.advice import descriptions, layout_ladder
from shardscope.planner.advice.plan_evaluator import (
    PAYS,
    SAFE,
    EvaluatedPlan,
    Outcome,
    PlanEvaluator,
    is_faster,
)
from shardscope.planner.advice.plans_from_search import search_all_layouts
from shardscope.planner.advice.simplicity import is_dominating

if TYPE_CHECKING:
    from shardscope.planner.advice.layout_ladder import Rung
    from shardscope.planner.repairs.repairs import Repair
    from shardscope.planner.search.ranking import Ranking
    from shardscope.planner.search.search import Progress


@dataclass(kw_only=True)
class Draft:
    """A turn before the final plan is known."""

    key: str
    """The rung of the plan that the turn leads to; empty if it leads to none."""
    question: str
    answer: str
    number: str
    why: str
    evaluated: EvaluatedPlan | None = None
    taken: bool = False


def _ignore_progress(message: str, fraction: float) -> None:
    """Ignore the progress, if no callback was given."""


class QuestionPath:
    """The turns so far, and :attr:`current`, the plan that they led to."""

    def __init__(
        self,
        evaluator: PlanEvaluator,
        familiar: Iterable[str],
        on_screen: EvaluatedPlan | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.evaluator, self.familiar = evaluator, tuple(familiar)
        self.on_screen = on_screen
        """The plan on screen, if it is for this question and fits."""
        self.progress: Progress = _ignore_progress if progress is None else progress
        """Called with a message and a fraction; it raises to end the advice."""
        self.keeps_on_screen = False
        self.drafts: list[Draft] = []
        self.current: EvaluatedPlan | None = None
        self.rung = ""
        """Key of the question that :attr:`current` answers."""
        self.first_rung = ""
        """Key of the first question that a plan answers: the simplest that fits."""
        self.settings: list[Repair] = []
        """Single settings that make :attr:`current` faster and save memory."""
        self.seen: dict[str, Outcome] = {}
        """Outcome of each rung."""

    @cached_property
    def ranking(self) -> Ranking | None:
        """Return the search's ranking for the same question; None if a required figure is not known."""
        return search_all_layouts(self.evaluator, self.progress)

    @property
    def is_settled(self) -> bool:
        """Return whether the current plan fits with the recipe unchanged and not tightly, so that more
        complex ones are not evaluated."""
        current = self.current
        return (
            current is not None
            and current.plan.recipe == self.evaluator.recipe
            and not current.report.is_tight
        )

    def try_rung(self, key: str, rung: Rung, question: str, why: str) -> None:
        """Try a rung and record the turn; its plan is taken if nothing fits so far, or if it is better."""
        # 1. The rung's best plan; without one, the turn says what is missing.
        outcome = self.choose_rung(key, rung)
        best = outcome.best
        if best is None:
            self.record_turn(
                "", question, self.explain_misfit(outcome), self.describe_needs(outcome), why, outcome.nearest
            )
            return
        # 2. The first plan that fits is taken without a comparison.
        why_not = self._why_not_the_first(rung, best)
        if self.current is None:
            self.set_current(key, best)
            self.record_turn(
                key, question, f"Yes: {self.name_plan(best)}{why_not}.", describe_figures(best), why, best
            )
            return
        # 3. Later ones are compared with the current plan, both with their remaining memory used: otherwise
        # the plan with more room would lose to one that merely has the larger micro-batch.
        best, current = self.evaluator.with_room(best), self.evaluator.with_room(self.current)
        how, comparison = f"{self.name_plan(best)}{why_not}", self.compare_plans(best, current)
        looser = current.report.is_tight and not best.report.is_tight
        stays = current.moves_activations and not best.moves_activations
        answer = f"Yes: {how}, {comparison}."
        # 4. The same framework trains one and not the other, whatever is installed.
        same_framework = best.plan.layout.framework == current.plan.layout.framework
        if same_framework and is_trained(current.plan) and not is_trained(best.plan):
            answer = f"Yes, {how}, {comparison}, but it cannot be launched here."
            self.record_turn(key, question, answer, describe_figures(best), why, best)
            return
        # 5. Reasons to take it, the strongest first: it is not tight, keeps activations on the GPU, is
        # clearly faster, dominates, or needs clearly less memory at no cost.
        if looser and not is_faster(current, best, SAFE):
            answer = f"Yes: {how}, which is not tight, and {comparison}."
            self.set_current(key, best)
        elif stays and not is_faster(current, best):
            answer = f"Yes: {how}, with activations on the GPU, and {comparison}."
            self.set_current(key, best)
        elif is_faster(best, current):
            self.set_current(key, best)
        elif is_dominating(best, current, self.evaluator.recipe, self.familiar):
            answer = f"Yes: {how}, {comparison}, with less memory and no more to set."
            self.set_current(key, best)
        elif _is_roomier(best, current):
            answer = f"Yes: {how}, {comparison}, and it needs clearly less memory."
            self.set_current(key, best)
        else:
            only = "only " if is_faster(best, current, 1.0) else ""
            answer = f"Yes, {how}, but {only}{comparison}: not worth it."
            key = ""
        self.record_turn(key, question, answer, describe_figures(best), why, best)

    def name_plan(self, evaluated: EvaluatedPlan) -> str:
        """Return the plan's name, with its changes to the requested recipe."""
        return descriptions.name_plan(evaluated.plan, self.evaluator.recipe)

    def _why_not_the_first(self, rung: Rung, best: EvaluatedPlan) -> str:
        """Return why the rung's default framework is not used, if it lacks memory; otherwise an empty
        string."""
        # The question names one framework, so an answer with another one says why the first was not possible.
        first = rung.layouts[0]
        if first.framework == best.plan.layout.framework:
            return ""
        nearest = self.evaluator.evaluate_layout(first).nearest
        return (
            "" if nearest is None else f" (for {first.title} it is {descriptions.describe_shortage(nearest)})"
        )

    def choose_rung(self, key: str, rung: Rung) -> Outcome:
        """Return and record the outcome of a rung, with a familiar framework if it is as good."""
        outcome = self.seen[key] = layout_ladder.choose_outcome(self.evaluator, rung, self.familiar)
        return outcome

    def set_current(self, key: str, evaluated: EvaluatedPlan) -> None:
        """Make ``evaluated`` the current plan."""
        self.first_rung = self.first_rung or key
        self.rung, self.current = key, evaluated

    def record_turn(
        self,
        key: str,
        question: str,
        answer: str,
        number: str,
        why: str,
        evaluated: EvaluatedPlan | None = None,
        *,
        taken: bool = False,
    ) -> None:
        """Record a turn; it counts as taken if ``key`` is the rung of the final plan."""
        self.drafts.append(
            Draft(
                key=key,
                question=question,
                answer=answer,
                number=number,
                why=why,
                evaluated=evaluated,
                taken=taken,
            )
        )

    def explain_misfit(self, outcome: Outcome) -> str:
        """Return the text why no plan of a rung fits."""
        if outcome.nearest is None:
            # A recipe that no layout runs is refused on every rung with the same text: print it once.
            again = any(str(outcome.refusal) in draft.answer for draft in self.drafts)
            return "It cannot run, for the same reason." if again else f"It cannot run: {outcome.refusal}"
        return f"No: {descriptions.describe_shortage(outcome.nearest)}."

    def describe_needs(self, outcome: Outcome) -> str:
        """Return the needed memory of a rung's nearest miss; empty if there is none."""
        return "" if outcome.nearest is None else descriptions.describe_needs(outcome.nearest)

    def compare_plans(self, best: EvaluatedPlan, current: EvaluatedPlan) -> str:
        """Return the comparison of two plans, such as ``18 % faster than FSDP2``."""
        if best.seconds is None or current.seconds is None:
            return f"no time is known to set it above {self.name_plan(current)}"
        return f"{descriptions.compare_speed(best, current)} than {self.name_plan(current)}"


def _is_roomier(best: EvaluatedPlan, current: EvaluatedPlan) -> bool:
    """Return whether a plan needs clearly less memory and is no slower."""
    if best.seconds is None or current.seconds is None:
        return False
    needed = best.report.peak_bytes * PAYS
    return best.seconds <= current.seconds and needed < current.report.peak_bytes


def describe_figures(evaluated: EvaluatedPlan) -> str:
    """Return the text of a plan's memory and speed."""
    return f"{descriptions.describe_needs(evaluated)}; {descriptions.describe_speed(evaluated)}"
