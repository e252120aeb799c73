"""Step times of candidates, for some of their plans: those that fit, or those that are read later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from shardscope.planner.search.candidates import Candidates, group_by_part
from shardscope.prediction.batch.step import compute_step_seconds
from shardscope.prediction.batch.table import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.cluster import Cluster


def compute_step_times(
    group: Sequence[Candidates],
    wanted: Sequence[NDArray[np.bool_]],
    cluster: Cluster,
    table: Table | None = None,
) -> list[NDArray[np.float64]]:
    """Return the step seconds of each candidate's plans, shape ``(num_plans,)``; NaN for some not wanted.

    ``group`` has candidates of one part, ``wanted`` a mask of the plans of each. ``table`` has all plans of
    the part, if it exists. Raises ``ValueError`` that names an unknown figure.
    """
    part = group[0].part
    step_seconds = [np.full(part.num_plans, np.nan) for _ in group]
    # One smaller table for all candidates: most plans of a large grid fit with none of them.
    is_wanted = np.logical_or.reduce(wanted)
    if not is_wanted.any():
        return step_seconds
    if table is None or not is_wanted.all():
        table = Table(part.select_plans(is_wanted))
    try:
        for one, mask, seconds in zip(group, wanted, step_seconds, strict=True):
            if not mask.any():
                continue
            if one.recipe.optimizer.startswith("paged"):
                # Page transfers depend on the whole report. Only DDP supports paging, with few plans.
                for row in np.flatnonzero(mask):
                    seconds[row] = one.build_plan(cluster, int(row)).step().seconds
                continue
            plans = table.build_plans(cluster, one.recipe, one.layout)
            weights = table.count_weights(plans, one.layout)
            seconds[is_wanted] = compute_step_seconds(table, plans, weights)
    finally:
        table.clear_results()
    return step_seconds


def complete_step_seconds(
    candidates: Sequence[Candidates],
    wanted: NDArray[np.bool_],
    cluster: Cluster,
    step_seconds: NDArray[np.float64],
) -> None:
    """Compute the step seconds of the plans of a mask, and write them into ``step_seconds``.

    Both arrays have the plans of all candidates, shape ``(num_evaluated,)``; seconds that are known stay.
    """
    ends = np.cumsum([one.num_plans for one in candidates])
    masks = np.split(wanted, ends[:-1])
    # Views: writing into them fills the array.
    outputs = np.split(step_seconds, ends[:-1])
    for indices in group_by_part(candidates):
        group = [candidates[index] for index in indices]
        computed = compute_step_times(group, [masks[index] for index in indices], cluster)
        for index, seconds in zip(indices, computed, strict=True):
            np.copyto(outputs[index], seconds, where=masks[index])
