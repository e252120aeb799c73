"""``make_it_fit``: the cheapest combination of changes that makes a plan fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardscope.frameworks.registry import frameworks, is_trained
from shardscope.planner.advice.plan_evaluator import PAYS, SAFE
from shardscope.planner.differences import find_differences
from shardscope.planner.memory_needs import WHILE_BUILT, list_memory_needs
from shardscope.planner.repairs.combined_changes import (
    NEAR,
    combine_changes,
    describe_change,
    keep_options,
)
from shardscope.planner.repairs.repairs import MAX_TIMES_SLOWER, describe_effect, find_steps, predict_seconds
from shardscope.planner.search.search import search
from shardscope.planner.verdict import State, assess_plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.plan import Plan
    from shardscope.planner.search.ranking import Ranking

MAX_PLANS = 200
"""Number of the search's fastest plans that are compared."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A plan that fits, and the changes that lead to it from one that does not."""

    plan: Plan
    changes: tuple[str, ...]
    """Text of each change: ``recompute none → full``, ``FSDP2 (CPU offload) instead of Megatron-core``."""
    bytes_won: int
    """Saved bytes of the memory that was too small: GPU memory on the worst rank, or host memory or NVMe on
    the node that needs most."""
    seconds_lost: float
    """Predicted seconds that an optimizer step takes longer (negative: shorter); NaN if not known."""
    own_framework_fits: bool = False
    """Whether a plan of the same framework would fit too, but much slower."""

    @property
    def text(self) -> str:
        """Return all changes in one line."""
        return ", ".join(self.changes)

    def __str__(self) -> str:
        return f"{self.text}: {describe_effect(self.bytes_won, self.seconds_lost)}"

    __repr__ = __str__


def make_it_fit(plan: Plan) -> Fit | None:
    """Return the cheapest combination of changes that makes ``plan`` fit; None if it fits, or nothing does.

    The cheapest plan has the least predicted step time; within 5 % of it, the fewest changes. Plans with the
    verdict "fits" come before tight ones that are not a third faster. The loss curve, the model and the GPUs
    stay the same. The framework stays too, unless its plans take over three times as long as predicted for
    ``plan`` and another framework's are faster: first frameworks with the same modules. Only if no such plan
    fits: 8-bit optimizer state, adapters, more nodes, and last a smaller model, each named in
    :attr:`Fit.changes`. Plans that can be launched here come first, if ``plan`` can be.
    """
    try:
        if assess_plan(plan).runs:
            return None
    except ValueError:  # There are no formulas for it.
        return None
    # Plans of known fit first. One that needs host memory of unknown size is better than changing the
    # training.
    fit = _search_on_these_gpus(plan, ("fits", "tight")) or _search_on_these_gpus(plan, ("unknown",))
    # Only now change what is trained, the number of nodes, or the model.
    if fit is None:
        change = combine_changes(plan)
        fit = (
            None
            if change is None
            else _FittingPlan(change.plan, change.plan.layout.framework == plan.layout.framework)
        )
    return None if fit is None else _build_fit(plan, fit.plan, fit.own_framework_fits)


class _FittingPlan(NamedTuple):
    plan: Plan
    own_framework_fits: bool


def _search_on_these_gpus(plan: Plan, states: Sequence[State]) -> _FittingPlan | None:
    """Return the cheapest plan of this framework, or of another one if that is much faster."""
    # The user chose the framework: leave it only for a plan that is faster by more than the prediction error,
    # and only if its own plans are several times as slow as the plan that does not fit.
    enough = MAX_TIMES_SLOWER * predict_seconds(plan)
    best: Plan | None = None
    own_fits = False
    for names in _list_frameworks_by_nearness(plan):
        cheapest = _find_cheapest(plan, _list_offered(plan, names), states)
        if cheapest is None:
            continue
        own_fits = own_fits or names == [plan.layout.framework]
        if best is None or predict_seconds(cheapest) * PAYS < predict_seconds(best):
            best = cheapest
        if predict_seconds(best) <= enough:
            break
    return None if best is None else _FittingPlan(best, own_fits)


def _list_frameworks_by_nearness(plan: Plan) -> Iterator[list[str]]:
    """Yield this framework, then those with the same modules, then those with their own modules."""
    framework = plan.layout.framework
    other_names = [name for name in frameworks if name != framework]
    yield [framework]
    # Frameworks that train the same modules (transformers') before those that rebuild the model.
    for is_same in (True, False):
        kernels = plan.layout.default_kernels
        names = [
            one for one in other_names if (frameworks[one].layout_class.default_kernels == kernels) is is_same
        ]
        if names:
            yield names


def _build_fit(plan: Plan, fitting: Plan, own_framework_fits: bool) -> Fit:
    # bytes_won counts the memory that was short first: the GPU's, unless that sufficed.
    short = assess_plan(plan).shortages[0]
    needed = {need.name: need.needed_bytes for need in list_memory_needs(fitting, fitting.memory())}
    return Fit(
        plan=fitting,
        changes=describe_change(plan, fitting).changes,
        bytes_won=short.needed_bytes - needed.get(short.name, 0),
        seconds_lost=predict_seconds(fitting) - predict_seconds(plan),
        own_framework_fits=own_framework_fits,
    )


def _list_offered(plan: Plan, names: Sequence[str]) -> list[Plan]:
    """Return plans of these frameworks on the same GPUs: single changes, then plans of a search."""
    # Single changes keep options that the search's grid does not have, so they are compared as well.
    steps = [step.plan for step in find_steps(plan) if step.plan.layout.framework in names]
    return [*steps, *_list_searched_plans(plan, names)]


def _list_searched_plans(plan: Plan, names: Sequence[str]) -> list[Plan]:
    """Return the fastest plans of a search on the same GPUs: not tight, tight, and with memory of unknown
    size."""
    try:
        ranking = search(plan.architecture, plan.cluster, plan.recipe, names)
    except ValueError:  # A required figure is not known.
        return []
    rankings = [ranking, *_list_chunked_rankings(plan, names, ranking)]
    plans: list[Plan] = []
    launched = is_trained(plan)
    for one in rankings:
        # Take plans of each verdict: the fastest ones alone might all be tight, or all need unknown memory.
        feasible, known, easy = one.is_feasible, one.is_room_known, ~one.is_tight
        for wanted in (feasible & known & easy, feasible & known & ~easy, feasible & ~known):
            rows = np.flatnonzero(wanted)
            plans += [keep_options(plan, fitting) for fitting in _list_fastest(one, rows, launched)]
    return plans


def _list_chunked_rankings(plan: Plan, names: Sequence[str], ranking: Ranking) -> list[Ranking]:
    """Return the ranking with the chunked loss, which has the same loss curve, if no plan of ``ranking``
    fits, or none of the plan's own framework has room: all are tight, or need host memory of unknown size."""
    # A search without any plan that fits has tried it already, or another global batch, which is no fix.
    if ranking.alternative is not None:
        same_batch = ranking.alternative.recipe.global_batch_size == plan.recipe.global_batch_size
        return [ranking.alternative] if same_batch else []
    has_room = (ranking.is_feasible & ranking.is_room_known & ~ranking.is_tight).any()
    # Not for other frameworks: a tight plan of theirs would replace a plan of this one.
    is_own = names == [plan.layout.framework]
    if has_room or not is_own or plan.recipe.loss is not None or plan.recipe.kernels is not None:
        return []
    try:
        return [search(plan.architecture, plan.cluster, replace(plan.recipe, loss="chunked"), names)]
    except ValueError:  # This framework does not have it.
        return []


def _list_fastest(ranking: Ranking, rows: NDArray[np.int64], launched: bool) -> list[Plan]:
    """Return the plans of ``rows`` near the fastest; ``launched``: that can be launched, if any can."""
    rows = rows[np.argsort(ranking.get_step_seconds(rows), kind="stable")][: 10 * MAX_PLANS]
    launchable: list[Plan] = []
    fallback: list[Plan] = []
    for row, seconds in zip(rows, ranking.get_step_seconds(rows), strict=True):
        one = ranking.plan(int(row))
        # Only plans near the fastest can win in _find_cheapest; of equally fast ones the fewest changes
        # decide.
        limit = NEAR * (launchable or fallback or [one])[0].step().seconds
        if len(launchable) >= MAX_PLANS or (launchable and seconds > limit):
            break
        if not launched or is_trained(one):
            launchable.append(one)
        elif len(fallback) < MAX_PLANS and seconds <= limit:
            fallback.append(one)
    return launchable or fallback


def _find_cheapest(plan: Plan, offered: Iterable[Plan], states: Sequence[State]) -> Plan | None:
    """Return the cheapest plan with the same training and the first of ``states`` that any plan has.

    A plan of a later state is returned if it is faster by more than recomputation could cost.
    """
    same = [one for one in offered if _trains_the_same(plan, one)]
    # A plan that can be launched must not become one that cannot, unless nothing else fits.
    if is_trained(plan):
        same = [one for one in same if is_trained(one)] or same
    states_of = [(one, _get_state(one)) for one in same]
    best: Plan | None = None
    for state in states:
        fitting = [one for one, plan_state in states_of if plan_state == state]
        if not fitting:
            continue
        least = min(map(_sortable_seconds, fitting))
        if best is None or least * SAFE < _sortable_seconds(best):
            near = [one for one in fitting if _sortable_seconds(one) <= NEAR * least]
            best = min(near, key=lambda one: (len(find_differences(plan, one)), _sortable_seconds(one)))
    return best


def _get_state(plan: Plan) -> State:
    """Return the state of a plan, without the host memory of unknown size that only building the model needs.

    Small plans of most frameworks need some, as in a search (``Ranking.is_room_known``): it is no reason to
    leave the user's framework.
    """
    verdict = assess_plan(plan)
    if verdict.state == "unknown" and all(need.name == WHILE_BUILT for need in verdict.unknown):
        return "tight" if plan.memory().verdict == "tight" else "fits"
    return verdict.state


def _trains_the_same(plan: Plan, other: Plan) -> bool:
    """Return whether the loss curve stays the same: precision, adapters, optimizer and batch."""
    fields = ("method", "precision", "optimizer", "quantization", "seq_len", "global_batch_size")
    return (plan.architecture, plan.cluster) == (other.architecture, other.cluster) and all(
        getattr(plan.recipe, name) == getattr(other.recipe, name) for name in fields
    )


def _sortable_seconds(plan: Plan) -> float:
    seconds = predict_seconds(plan)
    return math.inf if math.isnan(seconds) else seconds
