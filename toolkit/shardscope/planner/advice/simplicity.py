"""Simplicity of plans, and which plan outdoes which: faster, leaner, and no less simple."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardscope.frameworks.grid import DATA_PARALLEL, DEGREES
from shardscope.frameworks.registry import frameworks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.planner.advice.trials import Tried
    from shardscope.planner.search.ranking import Ranking

COUNTED = tuple(name for name in DEGREES if name != DATA_PARALLEL)
"""Degrees that count as a setting where they are above 1."""


EASED = ("recompute", "loss", "kernels", "attention")
"""Recipe fields that count as a setting where they are not the wanted ones."""


class Simplicity(NamedTuple):
    """What a plan asks of its users; less is simpler."""

    effort: int
    """``Framework.effort`` of its framework; 0 for one that the team knows."""
    settings: int
    """Degrees above 1, options that are not the framework's defaults, and recomputation, a loss or kernels
    that are not the wanted ones."""

    def is_as_simple_as(self, other: Simplicity) -> bool:
        """Whether neither the framework nor the settings ask for more."""
        return self.effort <= other.effort and self.settings <= other.settings


def simplicity_of(plan: Plan, wanted: Recipe, familiar: Collection[str] = ()) -> Simplicity:
    """Return what ``plan`` asks of users who wanted the recipe ``wanted`` and know the frameworks given."""
    degrees = sum(getattr(plan.degrees, name) > 1 for name in COUNTED)
    settings = degrees + _num_options(plan.layout) + _num_eased(plan.recipe, wanted)
    return Simplicity(_effort(plan.layout.framework, familiar), settings)


def simplicity_of_rows(
    ranking: Ranking, rows: NDArray[np.int64], wanted: Recipe, familiar: Collection[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the same of rows of a search: ``effort`` and ``settings``, of the shape of ``rows``."""
    found = ranking.candidates
    owners = ranking.owners(rows)
    effort = np.array([_effort(one.layout.framework, familiar) for one in found], np.int64)
    options = np.array([_num_options(one.layout) + _num_eased(one.recipe, wanted) for one in found], np.int64)
    return effort[owners], options[owners] + ranking.num_degrees_above_one(rows)


def outdoes(tried: Tried, other: Tried, wanted: Recipe, familiar: Collection[str] = ()) -> bool:
    """Whether ``tried`` is faster, needs less of a GPU and is as simple; False where a time is not known."""
    if tried.report.peak_bytes >= other.report.peak_bytes:
        return False
    own, its = (simplicity_of(one.plan, wanted, familiar) for one in (tried, other))
    if not own.is_as_simple_as(its) or tried.seconds is None or other.seconds is None:
        return False
    return tried.seconds < other.seconds


def _effort(framework: str, familiar: Collection[str]) -> int:
    return 0 if framework in familiar else frameworks[framework].effort


def _num_options(layout: Layout) -> int:
    """Return how many options are not as the framework has them."""
    plain = type(layout)()
    return sum(
        getattr(layout, name) != getattr(plain, name)
        for name in layout.__dataclass_fields__
        if name not in COUNTED and name != "shard"
    )


def _num_eased(recipe: Recipe, wanted: Recipe) -> int:
    """Return what differs from the wanted recipe; activations on the host count twice, for they need room."""
    eased: int = sum(getattr(recipe, name) != getattr(wanted, name) for name in EASED)
    moves_activations = recipe.recompute == "offload" and wanted.recompute != "offload"
    return eased + moves_activations
