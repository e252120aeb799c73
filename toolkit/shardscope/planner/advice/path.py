"""State of the questions of advice: the turns so far, and the plan that they led to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardscope.planner.advice import layout_ladder, words
from shardscope.planner.advice.alternatives import search_beside
from shardscope.planner.advice.simplicity import outdoes
from shardscope.planner.advice.trials import PAYS, SAFE, Bench, Outcome, Tried, is_faster

if TYPE_CHECKING:
    from shardscope.planner.advice.layout_ladder import Rung
    from shardscope.planner.repairs.repairs import Repair
    from shardscope.planner.search.ranking import Ranking


@dataclass(kw_only=True)
class Draft:
    """A turn before the final plan is known."""

    key: str
    """The rung of the plan that the turn leads to; empty if it leads to none."""
    question: str
    answer: str
    number: str
    why: str
    tried: Tried | None = None
    taken: bool = False


class Path:
    """The turns so far, and :attr:`current`, the plan that they led to."""

    def __init__(self, bench: Bench, familiar: Iterable[str], on_screen: Tried | None = None) -> None:
        self.bench, self.familiar = bench, tuple(familiar)
        self.on_screen = on_screen
        """The plan on screen, if it is for this question and fits."""
        self.keeps_on_screen = False
        self.drafts: list[Draft] = []
        self.current: Tried | None = None
        self.rung = ""
        """Key of the question that :attr:`current` answers."""
        self.settings: list[Repair] = []
        """Single settings that make :attr:`current` faster and save memory."""
        self.seen: dict[str, Outcome] = {}
        """Outcome of each rung."""

    @cached_property
    def ranking(self) -> Ranking | None:
        """Return the search's ranking for the same question; None if a required figure is not known."""
        return search_beside(self.bench)

    @property
    def is_settled(self) -> bool:
        """Return whether the current plan fits with the recipe unchanged and not tightly, so that more
        complex ones are not tried."""
        current = self.current
        return (
            current is not None and current.plan.recipe == self.bench.recipe and not current.report.is_tight
        )

    def try_rung(self, key: str, rung: Rung, question: str, why: str) -> None:
        """Try a rung and record the turn; its plan is taken if nothing fits so far, or if it is better."""
        outcome = self.choose(key, rung)
        best = outcome.best
        if best is None:
            self.told("", question, self.no(outcome), self.needs(outcome), why, outcome.nearest)
            return
        why_not = self._why_not_the_first(rung, best)
        if self.current is None:
            self.take(key, best)
            self.told(key, question, f"Yes: {self.name(best)}{why_not}.", figures(best), why, best)
            return
        best, current = self.bench.with_room(best), self.bench.with_room(self.current)
        how, beside = f"{self.name(best)}{why_not}", self.beside(best, current)
        looser = current.report.is_tight and not best.report.is_tight
        stays = current.moves_activations and not best.moves_activations
        answer = f"Yes: {how}, {beside}."
        if looser and not is_faster(current, best, SAFE):
            answer = f"Yes: {how}, which is not tight, and {beside}."
            self.take(key, best)
        elif stays and not is_faster(current, best):
            answer = f"Yes: {how}, with activations on the GPU, and {beside}."
            self.take(key, best)
        elif is_faster(best, current):
            self.take(key, best)
        elif outdoes(best, current, self.bench.recipe, self.familiar):
            answer = f"Yes: {how}, {beside}, with less memory and no more to set."
            self.take(key, best)
        elif _is_roomier(best, current):
            answer = f"Yes: {how}, {beside}, and it needs clearly less memory."
            self.take(key, best)
        else:
            only = "only " if is_faster(best, current, 1.0) else ""
            answer = f"Yes, {how}, but {only}{beside}: not worth it."
        self.told(key, question, answer, figures(best), why, best)

    def name(self, tried: Tried) -> str:
        """Return the plan's name, with its changes to the requested recipe."""
        return words.named(tried.plan, self.bench.recipe)

    def _why_not_the_first(self, rung: Rung, best: Tried) -> str:
        """Return why the rung's default framework is not used, if it lacks memory; otherwise an empty
        string."""
        first = rung.layouts[0]
        if first.framework == best.plan.layout.framework:
            return ""
        nearest = self.bench.outcome(first).nearest
        return "" if nearest is None else f" (for {first.title} it is {words.lacks(nearest)})"

    def choose(self, key: str, rung: Rung) -> Outcome:
        """Return and record the outcome of a rung, with a familiar framework if it is as good."""
        found = self.seen[key] = layout_ladder.choose(self.bench, rung, self.familiar)
        return found

    def take(self, key: str, tried: Tried) -> None:
        """Make ``tried`` the current plan."""
        self.rung, self.current = key, tried

    def told(
        self,
        key: str,
        question: str,
        answer: str,
        number: str,
        why: str,
        tried: Tried | None = None,
        *,
        taken: bool = False,
    ) -> None:
        """Record a turn; it counts as taken if ``key`` is the rung of the final plan."""
        self.drafts.append(
            Draft(key=key, question=question, answer=answer, number=number, why=why, tried=tried, taken=taken)
        )

    def no(self, outcome: Outcome) -> str:
        """Return the text why no plan of a rung fits."""
        if outcome.nearest is None:
            again = any(str(outcome.refusal) in draft.answer for draft in self.drafts)
            return "It cannot run, for the same reason." if again else f"It cannot run: {outcome.refusal}"
        return f"No: {words.lacks(outcome.nearest)}."

    def needs(self, outcome: Outcome) -> str:
        """Return the needed memory of a rung's nearest miss; empty if there is none."""
        return "" if outcome.nearest is None else words.needs(outcome.nearest)

    def beside(self, best: Tried, current: Tried) -> str:
        """Return the comparison of two plans, such as ``18 % faster than FSDP2``."""
        if best.seconds is None or current.seconds is None:
            return f"no time is known to set it above {self.name(current)}"
        return f"{words.compared(best, current)} than {self.name(current)}"


def _is_roomier(best: Tried, current: Tried) -> bool:
    """Return whether a plan needs clearly less memory and is no slower."""
    if best.seconds is None or current.seconds is None:
        return False
    needed = best.report.peak_bytes * PAYS
    return best.seconds <= current.seconds and needed < current.report.peak_bytes


def figures(tried: Tried) -> str:
    """Return the text of a plan's memory and speed."""
    return f"{words.needs(tried)}; {words.pace(tried.timed)}"
