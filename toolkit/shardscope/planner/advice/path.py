"""The way through the questions of advice: what was asked, and the plan so far."""

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
    """A turn whose place in the final plan is not decided yet."""

    key: str
    """The rung that it would put the plan on; empty where it does not."""
    question: str
    answer: str
    number: str
    why: str
    tried: Tried | None = None
    taken: bool = False


class Path:
    """What was asked so far, and :attr:`current`, the plan that it has led to."""

    def __init__(self, bench: Bench, familiar: Iterable[str], on_screen: Tried | None = None) -> None:
        self.bench, self.familiar = bench, tuple(familiar)
        self.on_screen = on_screen
        """The plan that the user has already, if it is one for this question and fits."""
        self.keeps_on_screen = False
        self.drafts: list[Draft] = []
        self.current: Tried | None = None
        self.rung = ""
        """Which question :attr:`current` answers."""
        self.settings: list[Repair] = []
        """Single settings that make :attr:`current` faster and save memory."""
        self.seen: dict[str, Outcome] = {}
        """What each rung came to."""

    @cached_property
    def ranking(self) -> Ranking | None:
        """All plans of a search for the same question; None where a figure is not known."""
        return search_beside(self.bench)

    @property
    def is_settled(self) -> bool:
        """Whether the plan so far fits well as it was wanted, so that nothing less simple need be asked."""
        current = self.current
        return (
            current is not None and current.plan.recipe == self.bench.recipe and not current.report.is_tight
        )

    def try_rung(self, key: str, rung: Rung, question: str, why: str) -> None:
        """Ask whether a rung fits; it is taken where nothing before it does, or where it is faster."""
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
        """A plan, and what in it is not as it was wanted."""
        return words.named(tried.plan, self.bench.recipe)

    def _why_not_the_first(self, rung: Rung, best: Tried) -> str:
        """Why it is not the framework that the rule has, where that is for want of memory."""
        first = rung.layouts[0]
        if first.framework == best.plan.layout.framework:
            return ""
        nearest = self.bench.outcome(first).nearest
        return "" if nearest is None else f" (for {first.title} it is {words.lacks(nearest)})"

    def choose(self, key: str, rung: Rung) -> Outcome:
        """What a rung comes to; the team's own framework where it does as well."""
        found = self.seen[key] = layout_ladder.choose(self.bench, rung, self.familiar)
        return found

    def take(self, key: str, tried: Tried) -> None:
        """Go on with this plan."""
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
        """Note a turn; one with the ``key`` of the rung that is left in the end is taken."""
        self.drafts.append(
            Draft(key=key, question=question, answer=answer, number=number, why=why, tried=tried, taken=taken)
        )

    def no(self, outcome: Outcome) -> str:
        """Why nothing of a rung fits."""
        if outcome.nearest is None:
            again = any(str(outcome.refusal) in draft.answer for draft in self.drafts)
            return "It cannot run, for the same reason." if again else f"It cannot run: {outcome.refusal}"
        return f"No: {words.lacks(outcome.nearest)}."

    def needs(self, outcome: Outcome) -> str:
        """What the nearest miss of a rung needs; empty where there is none."""
        return "" if outcome.nearest is None else words.needs(outcome.nearest)

    def beside(self, best: Tried, current: Tried) -> str:
        """``18 % faster than FSDP2``: of two plans."""
        if best.seconds is None or current.seconds is None:
            return f"no time is known to set it above {self.name(current)}"
        return f"{words.compared(best, current)} than {self.name(current)}"


def _is_roomier(best: Tried, current: Tried) -> bool:
    """Whether it needs clearly less memory and is no slower."""
    if best.seconds is None or current.seconds is None:
        return False
    needed = best.report.peak_bytes * PAYS
    return best.seconds <= current.seconds and needed < current.report.peak_bytes


def figures(tried: Tried) -> str:
    """What a plan needs, and its pace."""
    return f"{words.needs(tried)}; {words.pace(tried.timed)}"
