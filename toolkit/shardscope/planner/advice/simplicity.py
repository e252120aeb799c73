"""Simplicity of plans, and dominance: faster, leaner and no less simple."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardscope.frameworks.registry import frameworks
from shardscope.frameworks.search_grid import DATA_PARALLEL, DEGREES
from shardscope.timing.collectives import crosses_nodes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.planner.advice.plan_evaluator import EvaluatedPlan
    from shardscope.planner.search.ranking import Ranking

COUNTED = tuple(name for name in DEGREES if name != DATA_PARALLEL)
"""Degrees that count as a setting if they are above 1."""


EASED = ("recompute", "loss", "kernels", "attention")
"""Recipe fields that count as a setting if they differ from the requested recipe."""


OVERLAP = ("overlap_grad_reduce", "overlap_param_gather", "overlap_comm")
"""Layout options that do not count: they send the same while the GPU computes."""


class Simplicity(NamedTuple):
    """Effort and number of settings of a plan; less is simpler."""

    effort: int
    """``Framework.effort`` of the framework; 0 for a familiar one."""
    degrees: int
    """Number of degrees above 1 (:func:`count_degrees`): each is more to understand than an option."""
    settings: int
    """Number of degrees, of options that are not defaults, and of changes to the requested recomputation,
    loss and kernels."""

    def is_as_simple_as(self, other: Simplicity) -> bool:
        """Return whether neither effort nor degrees nor settings exceed the other's."""
        return all(mine <= theirs for mine, theirs in zip(self, other, strict=True))


def compute_simplicity(plan: Plan, wanted: Recipe, familiar: Collection[str] = ()) -> Simplicity:
    """Return the simplicity of ``plan`` compared with the recipe ``wanted``, for users who know the
    ``familiar`` frameworks."""
    # What counts is what a user has to choose and understand, not how large the numbers are.
    degrees = count_degrees(plan)
    settings = degrees + _num_options(plan.layout) + _num_eased(plan.recipe, wanted)
    return Simplicity(_get_effort(plan.layout.framework, familiar), degrees, settings)


def count_degrees(plan: Plan) -> int:
    """Return the number of parallel degrees above 1, without data parallelism.

    Tensor parallelism across nodes counts twice: every layer depends on the network, which
    ``plan.findings()`` reports.
    """
    crosses = crosses_nodes(plan.degrees.tp, plan.cluster.gpus_per_node)
    return int(crosses) + sum(bool(getattr(plan.degrees, name) > 1) for name in COUNTED)


class RowSimplicity(NamedTuple):
    """:class:`Simplicity` of rows of a search, one array for each field."""

    effort: NDArray[np.int64]
    degrees: NDArray[np.int64]
    settings: NDArray[np.int64]

    def is_as_simple_as(self, limit: Simplicity) -> NDArray[np.bool_]:
        """Return the mask of the rows that are as simple as ``limit``."""
        as_simple: NDArray[np.bool_] = (
            (self.effort <= limit.effort)
            & (self.degrees <= limit.degrees)
            & (self.settings <= limit.settings)
        )
        return as_simple


def compute_simplicity_of_rows(
    ranking: Ranking, rows: NDArray[np.int64], wanted: Recipe, familiar: Collection[str]
) -> RowSimplicity:
    """Return the simplicity of rows of a search."""
    # Per group of candidates in Python, per row in numpy: rows of one group differ in degrees only.
    candidates = ranking.candidates
    owners = ranking.owners(rows)
    effort = np.array([_get_effort(one.layout.framework, familiar) for one in candidates], np.int64)
    options = np.array(
        [_num_options(one.layout) + _num_eased(one.recipe, wanted) for one in candidates], np.int64
    )
    crosses = crosses_nodes(ranking.column("tp")[rows], ranking.cluster.gpus_per_node)
    degrees = ranking.num_degrees_above_one(rows) + crosses
    return RowSimplicity(effort[owners], degrees, options[owners] + degrees)


def is_dominating(
    evaluated: EvaluatedPlan, other: EvaluatedPlan, wanted: Recipe, familiar: Collection[str] = ()
) -> bool:
    """Return whether ``evaluated`` is faster, needs less GPU memory and is as simple; False if a time is not
    known."""
    # Memory first: its report exists already, while the step time may have to be computed.
    if evaluated.report.peak_bytes >= other.report.peak_bytes:
        return False
    # A plan that is better but harder to use is a choice for the user, not an improvement.
    simplicity, other_simplicity = (
        compute_simplicity(one.plan, wanted, familiar) for one in (evaluated, other)
    )
    if not simplicity.is_as_simple_as(other_simplicity) or evaluated.seconds is None or other.seconds is None:
        return False
    return evaluated.seconds < other.seconds


def _get_effort(framework: str, familiar: Collection[str]) -> int:
    return 0 if framework in familiar else frameworks[framework].effort


def _num_options(layout: Layout) -> int:
    """Return the number of options that differ from the framework's defaults."""
    plain = type(layout)()
    return sum(
        getattr(layout, name) != getattr(plain, name)
        for name in layout.__dataclass_fields__
        if name not in COUNTED and name not in OVERLAP and name != "shard"
    )


def _num_eased(recipe: Recipe, wanted: Recipe) -> int:
    """Return the number of changes to the requested recipe; offloaded activations count twice, because they
    need host memory."""
    eased: int = sum(getattr(recipe, name) != getattr(wanted, name) for name in EASED)
    moves_activations = recipe.recompute == "offload" and wanted.recompute != "offload"
    return eased + moves_activations
