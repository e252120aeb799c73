"""The first layout for a framework chosen by the user: degrees that suit model and cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardscope.core.errors import check_choice
from shardscope.core.plan import Plan
from shardscope.frameworks.registry import frameworks, is_trained
from shardscope.frameworks.search_grid import MICRO_BATCH_SIZE
from shardscope.planner.advice.plan_evaluator import has_offload
from shardscope.planner.search.candidates import Candidates, list_candidates
from shardscope.planner.search.search import check_figures, rank_candidates
from shardscope.planner.verdict import State, assess_plan
from shardscope.timing.collectives import crosses_nodes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.layout import Layout
    from shardscope.core.recipe import Recipe
    from shardscope.planner.search.ranking import Ranking

NEAR = 1.05
"""Ratio of step times within which the simplest layout is chosen: the median error of a predicted step is 6
%."""
MAX_CHECKED = 200
"""Number of the fastest layouts that are checked for whether they can be launched here."""


def choose_first_layout(framework: str, arch: Architecture, cluster: Cluster, recipe: Recipe) -> Layout:
    """Return the layout of ``framework`` to start with for this model, cluster and recipe.

    The framework's defaults, if they fit and are about as fast as its best layout; otherwise the simplest
    layout that is. Layouts that need more recomputation or another micro-batch to fit come second, offload
    third. If nothing fits, the layout that needs the least GPU memory. If no time can be predicted, the
    defaults. Raises ``ValueError`` for an unknown framework.
    """
    default = frameworks[check_choice("framework", framework, list(frameworks))].layout_class()
    if not default.choices:
        return default
    try:
        return _choose_layout(default, arch, cluster, recipe)
    except ValueError:
        return default


def _choose_layout(default: Layout, arch: Architecture, cluster: Cluster, recipe: Recipe) -> Layout:
    check_figures(cluster, recipe)  # before the grid is built
    # Offer the recipe as it is, and with full recomputation and micro-batch 1, which need the least memory.
    offered = list(
        list_candidates(
            default.framework,
            arch,
            cluster,
            recipe,
            recompute=(recipe.recompute, "full"),
            micro_batch_sizes=(recipe.micro_batch_size, 1),
        )
    )
    # Preferences in order: no offload before offload, and within each the recipe as it is before an eased
    # one.
    as_it_is = [one for one in offered if one.recipe.recompute == recipe.recompute]
    eased = [one for one in offered if one.recipe.recompute == "full"]
    groups = [
        ([one for one in candidates if has_offload(one.layout) is offload], size)
        for offload in (False, True)
        for candidates, size in ((as_it_is, recipe.micro_batch_size), (eased, None))
    ]
    # Plans that can be launched here come first in all groups; only then those that can only be exported.
    rankings: dict[int, Ranking] = {}
    for launched in (True, False):
        for number, (candidates, size) in enumerate(groups):
            if not candidates:
                continue
            if number not in rankings:  # Evaluate a group only if the previous ones have no plan.
                rankings[number] = rank_candidates(arch, cluster, recipe, candidates)
            ranking = rankings[number]
            plan = _find_simplest(ranking, _find_fitting_rows(ranking, size), default, launched=launched)
            if plan is not None:
                return default if _is_as_good(default, plan, arch, cluster, recipe) else plan.layout
    return _find_leanest(rankings[min(rankings)], default) if rankings else default


def _find_fitting_rows(ranking: Ranking, micro_batch_size: int | None) -> NDArray[np.int64]:
    """Return the rows that fit not tightly into memory of known size; without any, the tight ones, then those
    of unknown size."""
    fitting = ranking.is_feasible & _find_rows_inside_a_node(ranking)
    if micro_batch_size is not None:
        fitting = fitting & (ranking.column(MICRO_BATCH_SIZE) == micro_batch_size)
    easy = fitting & ~ranking.is_tight
    for wanted in (easy & ranking.is_room_known, fitting & ranking.is_room_known):
        if wanted.any():
            return np.flatnonzero(wanted)
    return np.flatnonzero(fitting)


def _find_rows_inside_a_node(ranking: Ranking) -> NDArray[np.bool_]:
    """Return whether tensor and context parallelism, which communicate in every layer, stay inside a node."""
    consecutive = ranking.column("tp") * ranking.column("cp")
    return ~crosses_nodes(consecutive, ranking.cluster.gpus_per_node)


def _find_simplest(
    ranking: Ranking, rows: NDArray[np.int64], default: Layout, *, launched: bool
) -> Plan | None:
    """Return the plan near the fastest with the fewest settings; None if there is none.

    ``launched``: only plans that can be launched here count.
    """
    rows = rows[np.argsort(ranking.get_step_seconds(rows), kind="stable")]
    # Whether a plan can be launched is asked plan by plan, so only until the fastest such plan is found.
    if launched:
        first = next((n for n, row in enumerate(rows[:MAX_CHECKED]) if _can_be_launched(ranking, row)), None)
        rows = rows[:0] if first is None else rows[first:]
    if not len(rows):
        return None
    rows = rows[ranking.get_step_seconds(rows) <= NEAR * ranking.get_step_seconds(rows[:1])]
    rows = _sort_by_settings(ranking, rows, default)
    candidates = (row for row in rows if not launched or _can_be_launched(ranking, row))
    return ranking.plan(int(next(candidates)))


def _can_be_launched(ranking: Ranking, row: np.int64) -> bool:
    return is_trained(ranking.plan(int(row)))


def _sort_by_settings(ranking: Ranking, rows: NDArray[np.int64], default: Layout) -> NDArray[np.int64]:
    changed = np.array([_count_changed_options(one, default) for one in ranking.candidates])
    settings = ranking.num_degrees_above_one(rows) + changed[ranking.owners(rows)]
    return rows[np.argsort(settings, kind="stable")]


def _count_changed_options(candidates: Candidates, default: Layout) -> int:
    names = [name for name in default.__dataclass_fields__ if name not in candidates.part.columns]
    return sum(getattr(candidates.layout, name) != getattr(default, name) for name in names)


def _is_as_good(default: Layout, plan: Plan, arch: Architecture, cluster: Cluster, recipe: Recipe) -> bool:
    """Return whether the framework's defaults fit this recipe and are about as fast as ``plan``."""
    try:
        # Defaults are the simplest layout, so a small loss of speed is accepted, but not a worse verdict.
        # "Unknown" is no better than the plan's own: it may turn out not to fit.
        plain = Plan(arch, cluster, recipe, default)
        order: dict[State, int] = {"fits": 0, "tight": 1, "unknown": 2, "does not fit": 3}
        if order[assess_plan(plain).state] > min(2, order[assess_plan(plan).state]):
            return False
        return plain.step().seconds <= NEAR * plan.step().seconds
    except ValueError:
        return False


def _find_leanest(ranking: Ranking, default: Layout) -> Layout:
    """Return the simplest of the layouts that need about the least GPU memory, then the fastest."""
    # Nothing fits, so start from what is least short: of nearly equal needs the simplest, then the fastest.
    inside = np.flatnonzero(_find_rows_inside_a_node(ranking))
    rows = inside[ranking.peak_bytes[inside] <= NEAR * ranking.peak_bytes[inside].min()]
    rows = rows[np.argsort(ranking.get_step_seconds(rows), kind="stable")]
    return ranking.plan(int(_sort_by_settings(ranking, rows, default)[0])).layout
