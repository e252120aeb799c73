"""Plans from a search: the simplest one if no question leads to a plan, one that replaces the recommended
plan, and two that are better in one respect."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from shardscope.core.cluster import name_device
from shardscope.core.number_format import format_gib
from shardscope.frameworks.registry import is_trained, why_not_trained
from shardscope.frameworks.search_grid import DATA_PARALLEL, DEGREES
from shardscope.planner.advice import descriptions
from shardscope.planner.advice.plan_evaluator import (
    PAYS,
    SAFE,
    WORTH_A_SETTING,
    EvaluatedPlan,
    PlanEvaluator,
    find_fastest,
    is_clearly_better,
    is_faster,
)
from shardscope.planner.advice.simplicity import (
    compute_simplicity,
    compute_simplicity_of_rows,
    is_dominating,
)
from shardscope.planner.memory_needs import list_memory_needs, relies_on_unknown_memory
from shardscope.planner.search.search import search
from shardscope.timing.report import format_seconds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.plan import Plan
    from shardscope.planner.search.ranking import Ranking
    from shardscope.planner.search.search import Progress

MAX_ALTERNATIVES = 2
NEAR = 1.05
"""Largest ratio of step times that a prediction cannot distinguish: the simplest of such plans is offered."""
WORTH_ONE_MORE = 1.5
"""How many times faster a plan must be to be advised although it takes one more option or degree, or the
next framework by effort."""
MAX_CHECKED = 400
"""Number of the search's fastest kinds of plans that are checked for whether they can be launched here."""


def search_all_layouts(evaluator: PlanEvaluator, progress: Progress) -> Ranking | None:
    """Return the search's ranking for the same question; None if a required figure is not known.

    If none of its plans fits, return the ranking with the chunked loss, which has the same loss curve.
    ``progress`` is the search's.
    """
    try:
        ranking = search(evaluator.architecture, evaluator.cluster, evaluator.recipe, progress=progress)
    except ValueError:
        return None
    # Ranking.alternative may also have another global batch, which is another training: that one is no answer
    # here.
    other = ranking.alternative
    if ranking.num_feasible or other is None or not evaluator.trains_the_same(other.recipe):
        return ranking
    return other


def find_simplest(
    evaluator: PlanEvaluator, ranking: Ranking, familiar: Collection[str]
) -> tuple[EvaluatedPlan, EvaluatedPlan] | None:
    """Return the simplest plan of the search that fits, and the plan to advise; None if none fits.

    The advised plan is a more complex one only if that is clearly faster (:data:`PAYS`), as with the
    questions, or if the simplest is tight, needs memory of unknown size or cannot be launched here.
    """
    feasible, is_tight = ranking.is_feasible, ranking.is_tight
    simplest = _climb(evaluator, ranking, np.flatnonzero(feasible), familiar, max_levels=1)
    if simplest is None:
        return None
    for launched in (True, False):
        for mask in (feasible & ranking.is_room_known, feasible):
            pools = (np.flatnonzero(mask & ~is_tight), np.flatnonzero(mask & is_tight))
            plans = [_climb(evaluator, ranking, rows, familiar, launched=launched) for rows in pools]
            advised = find_fastest(one for one in plans if one is not None)
            if advised is not None:
                return simplest, advised
    return simplest, simplest


def _climb(
    evaluator: PlanEvaluator,
    ranking: Ranking,
    rows: NDArray[np.int64],
    familiar: Collection[str],
    *,
    launched: bool = False,
    max_levels: int | None = None,
) -> EvaluatedPlan | None:
    """Return the fastest of the simplest ``rows``, or of more complex ones that are clearly faster; None
    without rows."""
    effort, _, settings = compute_simplicity_of_rows(ranking, rows, evaluator.recipe, familiar)
    levels = np.unique(np.stack([effort, settings], axis=1), axis=0)  # From simple to complex.
    best: EvaluatedPlan | None = None
    for level_effort, level_settings in levels[:max_levels]:
        level = rows[(effort == level_effort) & (settings == level_settings)]
        if best is not None and best.seconds is not None:
            level = level[ranking.get_step_seconds(level) * PAYS < best.seconds]
        if launched:
            best = _find_first_launched(evaluator, ranking, level) or best
        elif len(level):
            best = _try_row(evaluator, ranking, level[np.argmin(ranking.get_step_seconds(level))]) or best
    return best


def find_better(
    evaluator: PlanEvaluator, ranking: Ranking, advised: EvaluatedPlan, familiar: Collection[str]
) -> EvaluatedPlan | None:
    """Return a plan of the search that is better than ``advised`` and as simple: leaner and faster, clearly
    faster and not tight, or not tight where ``advised`` is.

    A plan that is leaner or not tight may take one more option or degree, or the next framework by effort, if
    it is much faster (:data:`WORTH_ONE_MORE`). Where ``advised`` is tight and no plan as simple is not, it
    may if it is about as fast. None if there is none that can be launched here, or none at all where
    ``advised`` cannot be launched either.
    """
    if advised.seconds is None:
        return None
    rows = _list_rows_with_room(ranking, advised)
    seconds, peak = ranking.get_step_seconds(rows), ranking.peak_bytes[rows]
    limit = compute_simplicity(advised.plan, evaluator.recipe, familiar)
    simplicity = compute_simplicity_of_rows(ranking, rows, evaluator.recipe, familiar)
    is_loose = ~ranking.is_tight[rows]
    # Better in both, and clearly in at least one: differences in both that are within the error are no reason
    # to advise another plan.
    better = (seconds < advised.seconds) & (peak < advised.report.peak_bytes)
    counts = (seconds * WORTH_A_SETTING < advised.seconds) | (peak * PAYS < advised.report.peak_bytes)
    simple = simplicity.is_as_simple_as(limit)
    # One more option is one more setting, which may be a degree, or the next framework by effort: a plan with
    # its training state in host memory is no simpler than ZeRO-3 with all of it on the GPUs.
    limits = (
        limit._replace(settings=limit.settings + 1, degrees=limit.degrees + 1),
        limit._replace(effort=limit.effort + 1),
    )
    one_more = np.logical_or(*(simplicity.is_as_simple_as(one) for one in limits))
    is_worth_one = (better | is_loose) & (seconds * WORTH_ONE_MORE < advised.seconds)
    # Memory that stays free is no reason for a plan that is clearly slower; a tight plan may not run at all,
    # so a looser one may cost as much as recomputation could, or one more option.
    most = advised.seconds * SAFE if advised.report.is_tight else advised.seconds / PAYS
    as_loose = simple & is_loose & (seconds < most)
    if advised.report.is_tight and not as_loose.any():
        as_loose = one_more & is_loose & (seconds < advised.seconds * PAYS)
    wanted = (better & counts & simple) | (one_more & is_worth_one) | as_loose
    rows = rows[wanted]
    launched = _find_first_launched(evaluator, ranking, rows)
    if launched is not None and launched.seconds is not None:
        # Of those about as fast, the simplest, and of these the leanest, such as a smaller micro-batch.
        near = rows[ranking.get_step_seconds(rows) <= WORTH_A_SETTING * launched.seconds]
        by_simplicity = _sort_by_simplicity(evaluator, ranking, near, familiar, ranking.peak_bytes[near])
        return _find_first_launched(evaluator, ranking, by_simplicity, keep_order=True)
    if launched is not None or is_trained(advised.plan) or not len(rows):
        return launched
    return _try_row(evaluator, ranking, rows[np.argmin(ranking.get_step_seconds(rows))])


def find_alternatives(
    evaluator: PlanEvaluator, ranking: Ranking, advised: EvaluatedPlan, familiar: Collection[str]
) -> list[tuple[Plan, str]]:
    """Return a plan that is faster by more than the prediction error, and a leaner one that costs little
    time."""
    if advised.seconds is None:
        return []
    offered = [
        _find_faster(evaluator, ranking, advised, familiar),
        _find_leaner(evaluator, ranking, advised, familiar),
    ]
    # Next to a tight plan the leaner one matters more than the faster one.
    if advised.report.is_tight:
        offered.reverse()
    # With the options that the recommended plan has, too. The same plan may be both faster and leaner.
    offered = [one and evaluator.with_overlap(one, familiar) for one in offered]
    better = {
        one.plan: one
        for one in offered
        if one and one.plan != advised.plan and not is_dominating(one, advised, evaluator.recipe, familiar)
    }
    return [(one.plan, describe_alternative(one, advised, evaluator)) for one in better.values()]


def find_launched(
    evaluator: PlanEvaluator,
    ranking: Ranking,
    advised: EvaluatedPlan,
    familiar: Collection[str],
    *,
    same_framework: bool = False,
) -> EvaluatedPlan | None:
    """Return the simplest of the plans that can be launched here and are near the fastest of these; None if
    they take over a third longer than ``advised``.

    If none can be in memory of known size, one that needs memory of unknown size.
    """
    if advised.seconds is None:
        return None
    pools = (_list_rows_with_room(ranking, advised), np.flatnonzero(ranking.is_feasible & ~ranking.is_tight))
    for pool in pools:
        rows = pool[ranking.get_step_seconds(pool) <= SAFE * advised.seconds]
        if same_framework:
            is_same = [one.layout.framework == advised.plan.layout.framework for one in ranking.candidates]
            rows = rows[np.array(is_same, bool)[ranking.owners(rows)]]
        seconds = ranking.get_step_seconds(rows)
        launched = _find_simplest_near_fastest(evaluator, ranking, rows, familiar, seconds)
        if launched is not None:
            return launched
    return None


def find_launched_as_good(
    evaluator: PlanEvaluator, ranking: Ranking | None, advised: EvaluatedPlan, familiar: Collection[str]
) -> EvaluatedPlan | None:
    """Return the simplest plan of the same framework that can be launched here and is about as good as
    ``advised``, which cannot; None if there is none."""
    runs = [one for one in evaluator.fitting.values() if evaluator.trains_the_same(one.plan.recipe)]
    searched = (
        None if ranking is None else find_launched(evaluator, ranking, advised, familiar, same_framework=True)
    )
    # Large runs on hundreds of GPUs keep the framework made for them.
    near = [
        one
        for one in [*runs, *([searched] if searched else [])]
        if is_trained(one.plan)
        and one.plan.layout.framework == advised.plan.layout.framework
        and _is_about_as_good(one, advised)
        # Memory of unknown size may not be there.
        and not relies_on_unknown_memory(one.plan, one.report, advised.plan, advised.report)
    ]
    return min(
        near,
        key=lambda one: (
            one.report.is_tight,
            compute_simplicity(one.plan, evaluator.recipe, familiar),
            one.seconds or 0.0,
        ),
        default=None,
    )


def _is_about_as_good(evaluated: EvaluatedPlan, advised: EvaluatedPlan) -> bool:
    if evaluated.seconds is None or advised.seconds is None:
        return False
    # A tight plan may not run at all, so a looser one may cost as much as recomputation could.
    if advised.report.is_tight and not evaluated.report.is_tight:
        return not is_faster(advised, evaluated, SAFE)
    return not is_clearly_better(advised, evaluated)


def describe_alternative(evaluated: EvaluatedPlan, advised: EvaluatedPlan, evaluator: PlanEvaluator) -> str:
    """Return one sentence with the gain and cost of a plan compared with the recommended one."""
    sentence = describe_gain(descriptions.name_plan(evaluated.plan, evaluator.recipe), evaluated, advised)
    return f"{sentence} {describe_obstacles(evaluated, advised)}".strip()


def describe_obstacles(evaluated: EvaluatedPlan, advised: EvaluatedPlan) -> str:
    """Return why a plan may not run where ``advised`` does: no launch here, memory of unknown size; empty if
    nothing is known."""
    refusal = why_not_trained(evaluated.plan)
    stops = refusal is not None and is_trained(advised.plan)
    launch = f"Cannot be launched here: {refusal}" if stops else ""
    return f"{launch} {descriptions.describe_unknown_memory(evaluated)}".strip()


def describe_gain(name: str, evaluated: EvaluatedPlan, advised: EvaluatedPlan) -> str:
    """Return the text of a comparison:
    ``FSDP2: 7 % faster, 12.2 GiB less on each GPU (3.86 s per step, 41.8 GiB).``"""
    gain = descriptions.compare_speed(evaluated, advised)
    if is_faster(evaluated, advised):
        gain += " (larger than our usual prediction error)"
    more = evaluated.report.peak_bytes - advised.report.peak_bytes
    unit = name_device(evaluated.plan.cluster)
    memory = (
        f"{format_gib(abs(more))} GiB {'more' if more > 0 else 'less'} on each {unit}"
        if more
        else "as much memory"
    )
    seconds, peak_bytes = evaluated.seconds or 0.0, evaluated.report.peak_bytes
    tight = ""
    if evaluated.report.is_tight:
        tight = ", also tight" if advised.report.is_tight else ", which is tight"
    return (
        f"{name}: {gain}, {memory} ({format_seconds(seconds)} per step, {format_gib(peak_bytes)} GiB{tight})."
    )


def _find_faster(
    evaluator: PlanEvaluator, ranking: Ranking, advised: EvaluatedPlan, familiar: Collection[str]
) -> EvaluatedPlan | None:
    # Only a gain beyond the prediction error is worth the user's attention.
    rows = _list_rows_with_room(ranking, advised)
    rows = rows[ranking.get_step_seconds(rows) * PAYS < (advised.seconds or 0.0)]
    if not len(rows):
        # A tight plan has to gain more than recomputation could cost.
        rows = np.flatnonzero(ranking.is_feasible & ranking.is_room_known)
        rows = rows[ranking.get_step_seconds(rows) * SAFE < (advised.seconds or 0.0)]
    if not len(rows):
        return None
    # A tight plan is no way out of a tight one, if there is another.
    loose = rows[~ranking.is_tight[rows]]
    for pool in (loose, rows):
        simplest = _find_simplest_near_fastest(
            evaluator, ranking, pool, familiar, ranking.get_step_seconds(pool)
        )
        if simplest is not None:
            return simplest
    rows = loose if len(loose) else rows
    return _try_row(evaluator, ranking, rows[np.argmin(ranking.get_step_seconds(rows))])


def _find_simplest_near_fastest(
    evaluator: PlanEvaluator,
    ranking: Ranking,
    rows: NDArray[np.int64],
    familiar: Collection[str],
    costs: NDArray[np.int64] | NDArray[np.float64],
) -> EvaluatedPlan | None:
    """Return the simplest of ``rows`` that can be launched here and are near the fastest of these, with the
    smallest of ``costs``."""
    launched = _find_first_launched(evaluator, ranking, rows)
    if launched is None or launched.seconds is None:
        return None
    # Predictions cannot distinguish the plans near the fastest.
    is_near = ranking.get_step_seconds(rows) <= NEAR * launched.seconds
    by_simplicity = _sort_by_simplicity(evaluator, ranking, rows[is_near], familiar, costs[is_near])
    return _find_first_launched(evaluator, ranking, by_simplicity, keep_order=True)


def _find_leaner(
    evaluator: PlanEvaluator, ranking: Ranking, advised: EvaluatedPlan, familiar: Collection[str]
) -> EvaluatedPlan | None:
    """Return the leanest of the plans near the fastest that need clearly less memory and at most one more
    setting; next to a tight plan, the simplest that is not tight, if there is one."""
    # A leaner plan is a choice, so that it never needs memory of unknown size.
    rows = _list_rows_with_room(ranking, advised)
    rows = rows[ranking.is_room_known[rows]]
    if advised.report.is_tight:
        loose = rows[~ranking.is_tight[rows]]
        loose = loose[ranking.get_step_seconds(loose) < SAFE * (advised.seconds or 0.0)]
        simplest = _find_simplest_near_fastest(evaluator, ranking, loose, familiar, ranking.peak_bytes[loose])
        if simplest is not None:
            return simplest
    limit = compute_simplicity(advised.plan, evaluator.recipe, familiar)
    effort, _, settings = compute_simplicity_of_rows(ranking, rows, evaluator.recipe, familiar)
    rows = rows[
        (ranking.peak_bytes[rows] * PAYS < advised.report.peak_bytes)
        & (ranking.get_step_seconds(rows) < SAFE * (advised.seconds or 0.0))
        & (effort <= limit.effort)
        & (settings <= limit.settings + 1)
    ]
    first = _find_first_launched(evaluator, ranking, rows)
    if first is None or first.seconds is None:
        return None
    near = rows[ranking.get_step_seconds(rows) <= NEAR * first.seconds]
    by_memory = near[np.argsort(ranking.peak_bytes[near], kind="stable")]
    return _find_first_launched(evaluator, ranking, by_memory, keep_order=True)


def _list_rows_with_room(ranking: Ranking, advised: EvaluatedPlan) -> NDArray[np.int64]:
    """Return the rows that fit into memory of known size; no tight ones, unless the recommended plan is
    tight."""
    # Never recommend a plan on the assumption that a node has more memory than the recommended plan needs of
    # it, where nobody gave the size.
    needed = {
        need.name: need.needed_bytes
        for need in list_memory_needs(advised.plan, advised.report)
        if need.room_bytes is None
    }
    needs_no_more = (ranking.host_bytes <= needed.get("host memory", 0)) & (
        ranking.nvme_bytes <= needed.get("NVMe", 0)
    )
    wanted = ranking.is_feasible & (ranking.is_room_known | needs_no_more)
    if not advised.report.is_tight:
        wanted = wanted & ~ranking.is_tight
    return np.flatnonzero(wanted)


def _sort_by_simplicity(
    evaluator: PlanEvaluator,
    ranking: Ranking,
    rows: NDArray[np.int64],
    familiar: Collection[str],
    costs: NDArray[np.int64] | NDArray[np.float64],
) -> NDArray[np.int64]:
    """Return ``rows`` from simple to complex; equally simple ones by their ``costs``."""
    effort, _, settings = compute_simplicity_of_rows(ranking, rows, evaluator.recipe, familiar)
    return rows[np.lexsort((costs, settings, effort))]


def _find_first_launched(
    evaluator: PlanEvaluator, ranking: Ranking, rows: NDArray[np.int64], *, keep_order: bool = False
) -> EvaluatedPlan | None:
    """Return the first of ``rows`` that can be launched here, by speed unless ``keep_order``; None if none
    can."""
    if not keep_order:
        rows = rows[np.argsort(ranking.get_step_seconds(rows), kind="stable")]
    # Whether a plan can be launched is asked plan by plan, in Python, so the number of questions is bounded.
    # It depends on the options, on which degrees are above 1, and on tp, which has to divide the model's
    # widths: ask once for each.
    kinds = ranking.owners(rows) * (ranking.cluster.num_gpus + 1) + ranking.column("tp")[rows]
    for name in (name for name in DEGREES if name not in (DATA_PARALLEL, "tp")):
        kinds = 2 * kinds + (ranking.column(name)[rows] > 1)
    firsts = np.unique(kinds, return_index=True)[1]
    for row in rows[np.sort(firsts)][:MAX_CHECKED]:
        if is_trained(ranking.plan(int(row))):
            return _try_row(evaluator, ranking, row)
    return None


def _try_row(evaluator: PlanEvaluator, ranking: Ranking, row: np.int64) -> EvaluatedPlan | None:
    plan = ranking.plan(int(row))
    return evaluator.evaluate_fitting_plan(plan.layout, plan.recipe)
