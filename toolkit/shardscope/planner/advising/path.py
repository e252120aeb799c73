"""The way through the questions of advice: what was asked, and the plan so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardscope.planner.advising import rungs, words
from shardscope.planner.advising.bench import SAFE, Bench, Outcome, Tried, is_faster

if TYPE_CHECKING:
    from shardscope.planner.advising.rungs import Rung


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

    def __init__(self, bench: Bench, familiar: Iterable[str]) -> None:
        self.bench, self.familiar = bench, tuple(familiar)
        self.drafts: list[Draft] = []
        self.current: Tried | None = None
        self.rung = ""
        """Which question :attr:`current` answers."""
        self.seen: dict[str, Outcome] = {}
        """What each rung came to."""

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
        how = words.named(best.plan, self.bench.recipe)
        if self.current is None:
            answer = f"Yes: {how}."
            self.take(key, best)
        else:
            beside = self.beside(best)
            looser = self.current.report.is_tight and not best.report.is_tight
            stays = self.current.moves_activations and not best.moves_activations
            if looser and not is_faster(self.current, best, SAFE):
                answer = f"Yes: {how}, which is not tight, and {beside}."
                self.take(key, best)
            elif stays and not is_faster(self.current, best):
                answer = f"Yes: {how}, with activations on the GPU, and {beside}."
                self.take(key, best)
            elif is_faster(best, self.current):
                answer = f"Yes: {how}, {beside}."
                self.take(key, best)
            else:
                answer = f"Yes, {how}, but {beside}: not worth it."
        self.told(key, question, answer, figures(best), why, best)

    def choose(self, key: str, rung: Rung) -> Outcome:
        """What a rung comes to; the team's own framework where it does as well."""
        found = self.seen[key] = rungs.choose(self.bench, rung, self.familiar)
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

    def beside(self, best: Tried) -> str:
        """``18 % faster than FSDP2``: beside the plan so far."""
        assert self.current is not None
        name = words.named(self.current.plan, self.bench.recipe)
        if best.seconds is None or self.current.seconds is None:
            return f"no time is known to set it above {name}"
        return f"{words.compared(best, self.current)} than {name}"


def figures(tried: Tried) -> str:
    """What a plan needs, and its pace."""
    return f"{words.needs(tried)}; {words.pace(tried.timed)}"
