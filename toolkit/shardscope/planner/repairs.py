"""``plan.repairs()``: the single changes that make a plan fit, cheapest in predicted time first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from shardscope.memory.words import gib
from shardscope.planner.changes import Change, ladders
from shardscope.timing.estimate import estimate

if TYPE_CHECKING:
    from shardscope.plan import Plan

MAX_HALF_WAY = 6
"""Changes that are told where none is enough."""


class Repair(NamedTuple):
    """One change of a plan that does not fit; unpacks as ``change, plan, bytes_won, seconds_lost``."""

    change: str
    """What is changed, in words."""
    plan: Plan
    """The changed plan; ``.memory().fits`` says whether this is enough."""
    bytes_won: int
    """By how much the peak of the worst rank falls."""
    seconds_lost: float
    """Predicted seconds that an optimizer step takes longer (negative: shorter), to first order
    (``timing/estimate.py``); NaN where something that decides it is not known."""


def repairs(plan: Plan) -> list[Repair]:
    """The single changes that make ``plan`` fit, cheapest in time first; none if it fits already.

    Of steps of one kind (a smaller micro-batch, one more shard) only the first that is enough is told. Where
    no single change is enough, those that win most are told, the best first.
    """
    report = plan.memory()
    if _fits(plan):
        return []
    enough: list[tuple[Change, int]] = []
    short: list[tuple[Change, int]] = []
    for ladder in ladders(plan):
        best: tuple[Change, int] | None = None
        for change in ladder:
            won = report.peak_bytes - change.plan.memory().peak_bytes
            if won > 0 and _fits(change.plan):
                enough.append((change, won))
                best = None
                break
            if won > 0 and (best is None or won > best[1]):
                best = (change, won)
        if best is not None:
            short.append(best)
    if not enough:
        short.sort(key=lambda found: -found[1])
        enough = short[:MAX_HALF_WAY]
        return [_priced(plan, change, won) for change, won in enough]
    return sorted((_priced(plan, change, won) for change, won in enough), key=_cheapest_first)


def _cheapest_first(repair: Repair) -> tuple[bool, float, int]:
    unknown = math.isnan(repair.seconds_lost)
    return unknown, 0.0 if unknown else repair.seconds_lost, -repair.bytes_won


def in_words(plan: Plan, repair: Repair) -> str:
    """``Recompute selectively: saves 12.3 GiB, about 4 % slower``, as a button says it."""
    return f"{repair.change}: saves {gib(repair.bytes_won)} GiB, {_cost_words(plan, repair)}"


def _cost_words(plan: Plan, repair: Repair) -> str:
    whole = estimate(plan).seconds
    if math.isnan(repair.seconds_lost) or math.isnan(whole):
        return "time unknown"
    share = repair.seconds_lost / whole
    if abs(share) < 0.005:
        return "about as fast"
    if share > 1:
        return f"about {1 + share:.1f} times the time"
    return f"about {abs(share):.0%} {'slower' if share > 0 else 'faster'}".replace("%", " %")


def _priced(plan: Plan, change: Change, won: int) -> Repair:
    lost = estimate(change.plan).seconds - estimate(plan).seconds
    return Repair(change.words, change.plan, won, lost)


def _fits(plan: Plan) -> bool:
    """On the card, and what was moved to a node's host or NVMe on those, as far as their size is known."""
    report, cluster = plan.memory(), plan.cluster
    if not report.fits:
        return False
    for used, room in (
        (report.host_bytes, cluster.host_memory_bytes),
        (report.nvme_bytes, cluster.nvme_bytes),
    ):
        if used and room is not None and used * cluster.gpus_per_node > room:
            return False
    return True
