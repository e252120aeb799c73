"""Where a search over all layouts finds another plan than the questions do: which, and by how much."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.frameworks.registry import why_not_trained
from shardscope.memory.overheads import TIGHT_PERCENT
from shardscope.planner.advising import words
from shardscope.planner.advising.bench import PAYS, WORTH_A_SETTING, Tried
from shardscope.planner.search import search
from shardscope.timing.report import seconds_words

if TYPE_CHECKING:
    from shardscope.plan import Plan
    from shardscope.planner.advising.bench import Bench
    from shardscope.planner.ranking import Ranking


MOST_ASKED = 1000
"""Of a search's plans, whether Launch trains them."""


class Disagreement(NamedTuple):
    """What the search would do instead."""

    plan: Plan | None
    """None where the search has none that fits."""
    words: str


def disagreement(bench: Bench, advised: Tried | None) -> Disagreement | None:
    """The search's first plan, where it is faster than the advised one; None where both agree.

    Or where no time can be told. Where the advised plan is not tight, the search's is not either. ``advised``
    None: the questions led nowhere.
    """
    if advised is None:
        return _found_alone(bench)
    if advised.seconds is None:
        return None
    room = bench.cluster.usable_bytes_per_gpu
    headroom = 0 if advised.report.is_tight else room - room * TIGHT_PERCENT // 100
    try:
        ranking = search(bench.architecture, bench.cluster, bench.recipe, headroom_bytes=headroom)
    except ValueError:
        return None
    if not len(ranking.order):
        return Disagreement(None, _not_in_the_grid(bench, advised, ranking))
    first = int(ranking.order[0])
    seconds = float(ranking.step_seconds[first])
    if seconds * WORTH_A_SETTING > advised.seconds:
        return None
    plan = ranking.best
    gained = words.shares(seconds, advised.seconds)
    beside = f"{seconds_words(seconds)} a step beside {seconds_words(advised.seconds)}, {gained}"
    clear = (
        "More than such predictions are usually wrong by: measure both for some steps."
        if seconds * PAYS < advised.seconds
        else "Less than such predictions are usually wrong by: begin with the simpler one."
    )
    with_room = f" of those with {100 - TIGHT_PERCENT} % of the card to spare" if headroom else ""
    found = f"Of {ranking.num_evaluated:,} plans a search puts {words.named(plan)} first{with_room}"
    told = (f"{found}: {beside}. {clear}", _unsaid(bench, plan), _untrained(ranking, plan, advised))
    return Disagreement(plan, " ".join(filter(None, told)))


def _found_alone(bench: Bench) -> Disagreement | None:
    """What a search finds where no plan is advised: it counts memory of unknown size as enough."""
    try:
        ranking = search(bench.architecture, bench.cluster, bench.recipe)
    except ValueError:
        return None
    if not len(ranking.order):
        return None
    plan, pace = ranking.best, seconds_words(float(ranking.step_seconds[ranking.order[0]]))
    found = f"Of {ranking.num_evaluated:,} plans a search finds {ranking.num_feasible:,} that may fit, first "
    return Disagreement(plan, f"{found}{words.named(plan)}: {pace} a step. {_unsaid(bench, plan)}".strip())


def _not_in_the_grid(bench: Bench, advised: Tried, ranking: Ranking) -> str:
    found = f"Of {ranking.num_evaluated:,} plans a search finds none that fits"
    if advised.plan.recipe.loss == bench.recipe.loss:
        return f"{found}: this one has what its grid leaves as it is."
    return f"{found}: its grid leaves the loss as it is, and this one computes it in chunks."


def _untrained(ranking: Ranking, plan: Plan, advised: Tried) -> str:
    """That Launch does not train the search's first plan, and the first that it does; empty: it does."""
    refusal = why_not_trained(plan)
    if refusal is None:
        return ""
    said = f"Launch does not train it here: {refusal}"
    for row in ranking.order[:MOST_ASKED]:
        seconds = float(ranking.step_seconds[row])
        if seconds * WORTH_A_SETTING > (advised.seconds or 0.0):
            break
        other = ranking.plan(int(row))
        if why_not_trained(other) is None:
            gained = words.shares(seconds, advised.seconds or seconds)
            named = words.named(other)
            return f"{said} The first that it does train is {named}: {seconds_words(seconds)}, {gained}."
    return f"{said} None that it does train is faster than the advised plan."


def _unsaid(bench: Bench, plan: Plan) -> str:
    tried = bench.tried(plan.layout, plan.recipe)
    return words.unsaid(tried) if isinstance(tried, Tried) else ""
