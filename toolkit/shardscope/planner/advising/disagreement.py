"""Where a search over all layouts finds a faster plan than the questions do: which, and by how much."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.memory.overheads import TIGHT_PERCENT
from shardscope.planner.advising import words
from shardscope.planner.advising.bench import PAYS, WORTH_A_SETTING, Tried
from shardscope.planner.search import search
from shardscope.timing.report import seconds_words

if TYPE_CHECKING:
    from shardscope.plan import Plan
    from shardscope.planner.advising.bench import Bench


class Disagreement(NamedTuple):
    """What the search would do instead."""

    plan: Plan
    words: str


def disagreement(bench: Bench, advised: Tried) -> Disagreement | None:
    """The search's first plan, where it is faster than the advised one; None where both agree.

    Or where no time can be told. Where the advised plan is not tight, the search's is not either.
    """
    if advised.seconds is None:
        return None
    room = bench.cluster.usable_bytes_per_gpu
    headroom = 0 if advised.report.is_tight else room - room * TIGHT_PERCENT // 100
    try:
        ranking = search(bench.architecture, bench.cluster, bench.recipe, headroom_bytes=headroom)
    except ValueError:
        return None
    if not len(ranking.order):
        return None
    first = int(ranking.order[0])
    seconds = float(ranking.step_seconds[first])
    if seconds * WORTH_A_SETTING > advised.seconds:
        return None
    plan = ranking.plan(first)
    gained = words.shares(seconds, advised.seconds)
    beside = f"{seconds_words(seconds)} a step beside {seconds_words(advised.seconds)}, {gained}"
    clear = (
        "More than such predictions are usually wrong by: measure both for some steps."
        if seconds * PAYS < advised.seconds
        else "Less than such predictions are usually wrong by: begin with the simpler one."
    )
    found = f"Of {ranking.num_evaluated:,} plans a search puts {words.named(plan)} first"
    tried = bench.tried(plan.layout, plan.recipe)
    unsaid = words.unsaid(tried) if isinstance(tried, Tried) else ""
    return Disagreement(plan, f"{found}: {beside}. {clear} {unsaid}".strip())
