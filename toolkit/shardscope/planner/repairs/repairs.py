"""``plan.repairs()``: single changes that make a plan fit, the cheapest in predicted time first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.html_table import render_html_table
from shardscope.core.number_format import format_gib
from shardscope.planner.advice.descriptions import compare_seconds
from shardscope.planner.memory_needs import MemoryNeed, find_shortages, fits, list_memory_needs
from shardscope.planner.repairs.single_changes import Change, Ladder, list_ladders
from shardscope.timing.paging import count_page_transfer_bytes
from shardscope.timing.report import format_seconds

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

MAX_HALF_WAY = 6
"""Number of changes returned if none is sufficient."""

MAX_TIMES_SLOWER = 3.0
"""Largest ratio of step times for a change to be offered: beyond it, several changes together, or another
framework, are nearly always better (:mod:`shardscope.planner.repairs.make_it_fit`)."""

COMBINE = "plan.make_it_fit()"
"""The function that combines changes, as text for messages."""

_FITS = "The plan fits: no change is needed."
_NOT_ALONE = (
    f"No single change makes the plan fit within {MAX_TIMES_SLOWER:g} times the step time. "
    f"Several together may: {COMBINE}."
)


class Repair(NamedTuple):
    """One change of a plan that does not fit; unpacks as ``change, plan, bytes_won, seconds_lost``."""

    change: str
    """Text of the change."""
    plan: Plan
    """The changed plan."""
    bytes_won: int
    """Saved bytes of the memory that was too small: the peak of the worst rank, or host memory or NVMe of a
    node if only that is too small."""
    seconds_lost: float
    """Predicted seconds that an optimizer step takes longer (negative: shorter); NaN if a required figure is
    not known, for which ``plan.step()`` raises ``ValueError``."""

    def __str__(self) -> str:
        return f"{self.change}: {describe_effect(self.bytes_won, self.seconds_lost)}"


def describe_effect(bytes_won: int, seconds_lost: float) -> str:
    """Return the saved memory and the cost in time: ``12.3 GiB less, a step is 45.6 ms longer``."""
    if math.isnan(seconds_lost):
        cost = "time not known"
    else:
        longer = "longer" if seconds_lost >= 0 else "shorter"
        cost = f"a step is {format_seconds(abs(seconds_lost))} {longer}"
    return f"{format_gib(bytes_won)} GiB less, {cost}"


class Repairs(list[Repair]):
    """A list of repairs, printed line by line and displayed as a table at the end of a notebook cell.

    ``plan_fits``: whether it is empty because the plan fits.
    """

    def __init__(self, repairs: Iterable[Repair], *, plan_fits: bool) -> None:
        super().__init__(repairs)
        self._empty_text = _FITS if plan_fits else _NOT_ALONE

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or self._empty_text

    # A plan with all its fields would fill a screen.
    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self:
            return f"<p>{self._empty_text}</p>"
        rows = [(one.change, round(one.bytes_won / 2**30, 1), one.seconds_lost) for one in self]
        return render_html_table(("change", "GiB saved", "seconds more per step"), rows)


class _ChangeResult(NamedTuple):
    change: Change
    won: int
    is_enough: bool


def find_repairs(plan: Plan) -> Repairs:
    """Return the single changes that make ``plan`` fit, the cheapest in time first; empty if it fits already.

    Of each kind (a smaller micro-batch, one more shard), only the first sufficient change. A change whose
    step takes more than :data:`MAX_TIMES_SLOWER` times as long is left out; one whose time is not known is
    included. If nothing is left, ``make_it_fit`` combines changes.
    """
    if fits(plan, plan.memory()):
        return Repairs((), plan_fits=True)
    seconds = predict_seconds(plan)
    enough = (step for step in find_steps(plan) if fits(step.plan, step.plan.memory()))
    return Repairs((step for step in enough if not _is_too_slow(step, seconds)), plan_fits=False)


def _is_too_slow(repair: Repair, seconds: float) -> bool:
    """Return whether the changed plan's step takes too long compared with ``seconds`` of the original
    plan."""
    return repair.seconds_lost > (MAX_TIMES_SLOWER - 1) * seconds  # False if either is NaN


def find_steps(plan: Plan) -> list[Repair]:
    """Return all single changes that make a plan fit, at any cost in time.

    If no single change is sufficient, the ones that save most, the best first, as steps of a combination.
    """
    report = plan.memory()
    short = find_shortages(plan, report)
    if not short:
        return []
    enough: list[_ChangeResult] = []
    half_way: list[_ChangeResult] = []
    for ladder in list_ladders(plan):
        best = _find_best(ladder, short[0])
        if best is not None:
            (enough if best.is_enough else half_way).append(best)
    seconds = predict_seconds(plan)
    # Nothing is sufficient alone: return the changes that save most, as steps of a combination.
    if not enough:
        half_way.sort(key=lambda tried: -tried.won)
        return [_build_repair(tried, seconds) for tried in half_way[:MAX_HALF_WAY]]
    return sorted((_build_repair(tried, seconds) for tried in enough), key=_cheapest_first)


def _find_best(ladder: Ladder, short: MemoryNeed) -> _ChangeResult | None:
    """Return the first sufficient change, otherwise the one that saves most of the ``short`` memory; None if
    none saves any."""
    best: _ChangeResult | None = None
    for change in ladder:
        try:
            report = change.plan.memory()
        except ValueError:  # The plan can run, but there are no formulas for it.
            continue
        needed = {need.name: need.needed_bytes for need in list_memory_needs(change.plan, report)}
        won = short.needed_bytes - needed.get(short.name, 0)
        if won <= 0:
            continue
        # Ladders are sorted from small to large changes, so the first that fits is the smallest.
        if fits(change.plan, report):
            return _ChangeResult(change, won, True)
        if best is None or won > best.won:
            best = _ChangeResult(change, won, False)
    return best


def _cheapest_first(repair: Repair) -> tuple[bool, float, int]:
    unknown = math.isnan(repair.seconds_lost)
    return unknown, 0.0 if unknown else repair.seconds_lost, -repair.bytes_won


def describe_repairs(plan: Plan, repairs: Sequence[Repair]) -> list[str]:
    """Return a button's text for each change: ``Recompute selectively: saves 12.3 GiB, about 4 % slower``."""
    report = plan.memory()
    short = find_shortages(plan, report)
    of = "" if not short or short[0].name == "GPU memory" else f" a node of {short[0].name}"
    seconds = predict_seconds(plan)
    return [
        f"{repair.change}: saves {format_gib(repair.bytes_won)} GiB{of}, "
        f"{_describe_cost(repair, seconds)}{_describe_paging(repair)}"
        for repair in repairs
    ]


def _describe_cost(repair: Repair, seconds: float) -> str:
    if math.isnan(repair.seconds_lost) or math.isnan(seconds):
        return "time unknown"
    cost = compare_seconds(seconds + repair.seconds_lost, seconds)
    return f"about {cost.replace('no faster', 'as fast')}"


def _describe_paging(repair: Repair) -> str:
    return ", while it pages" if count_page_transfer_bytes(repair.plan, repair.plan.memory()) else ""


def _build_repair(tried: _ChangeResult, seconds: float) -> Repair:
    """Return the repair with its time compared with the original plan's ``seconds``."""
    changed = predict_seconds(tried.change.plan)
    return Repair(tried.change.text, tried.change.plan, tried.won, changed - seconds)


def predict_seconds(plan: Plan) -> float:
    """Return the predicted seconds of one step; NaN where a figure is missing."""
    try:
        return plan.step().seconds
    except ValueError:
        return math.nan
