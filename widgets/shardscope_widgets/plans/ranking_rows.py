"""Rows of a search: their order, and the selection of marks for the chart."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

import shardscope as ss
from shardscope.core.serialization import replace_fields
from shardscope.frameworks.registry import frameworks
from shardscope.planner.advice.simplicity import OVERLAP
from shardscope.planner.differences import does_the_same
from shardscope_widgets.kit.theme import FRAMEWORK_COLOURS, FRAMEWORK_SIGNS, FRAMEWORK_SYMBOLS

if TYPE_CHECKING:
    from shardscope.planner.search.ranking import Ranking

ASCENDING: dict[str, bool] = {
    "tokens_per_second_per_gpu": False,
    "step_seconds": True,
    "peak_bytes": True,
    "headroom_bytes": False,
    "cost_per_token": True,
    "framework": True,
}
"""Sortable columns, and whether the first click sorts in ascending order: the better end comes first."""
GRID = (52, 28)
"""Columns and rows of the chart's grid: plans of one framework in one cell share a mark."""

Indices = npt.NDArray[np.int64]


class Sign(NamedTuple):
    """The colour and shape of a framework in chart and table."""

    title: str
    colour: str
    symbol: str
    text: str


def build_signs() -> dict[str, Sign]:
    """Return the sign of each framework by name, in registry order."""
    return {
        name: Sign(
            framework.title,
            FRAMEWORK_COLOURS[index % len(FRAMEWORK_COLOURS)],
            FRAMEWORK_SYMBOLS[index % len(FRAMEWORK_SYMBOLS)],
            FRAMEWORK_SIGNS[index % len(FRAMEWORK_SIGNS)],
        )
        for index, (name, framework) in enumerate(frameworks.items())
    }


def sort_rows(ranking: Ranking, column: str | None, ascending: bool) -> Indices:
    """Return feasible rows sorted by a column, with ties in ranking order; None: in ranking order."""
    rows = ranking.order
    # A cluster without a price has no costs.
    values = None if column is None else _get_column(ranking, column, rows)
    if values is None:
        return rows
    if not ascending:
        # Stable in both directions: reversing a stable sort would reverse ties.
        _, codes = np.unique(values, return_inverse=True)
        values = -codes
    return rows[np.argsort(values, kind="stable")]


def _get_column(
    ranking: Ranking, column: str, rows: Indices
) -> npt.NDArray[np.float64] | npt.NDArray[np.int64] | npt.NDArray[np.str_] | None:
    """Return a column of :data:`ASCENDING` for some rows; None if no price is known."""
    match column:
        case "tokens_per_second_per_gpu":
            return ranking.get_tokens_per_second_per_gpu(rows)
        case "step_seconds":
            return ranking.get_step_seconds(rows)
        case "cost_per_token":
            return ranking.get_cost_per_token(rows)
        case "peak_bytes":
            return ranking.peak_bytes[rows]
        case "headroom_bytes":
            return ranking.headroom_bytes[rows]
        case _:
            return ranking.framework[rows]


def choose_marks(
    ranking: Ranking,
    speed: npt.NDArray[np.float64],
    rows: Indices,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
) -> Indices:
    """Return the first of ``rows`` in each cell of the chart, for each framework.

    ``speed`` has the tokens per second per GPU of all plans, shape ``(num_evaluated,)``.
    """
    memory = np.asarray(ranking.peak_bytes, dtype=float)[rows]
    speed = speed[rows]
    _, codes = np.unique(np.asarray(ranking.framework)[rows], return_inverse=True)
    # One number per framework and cell, so that np.unique keeps the first, best plan of each.
    across = _find_cells(memory, x_range, GRID[0])
    upwards = _find_cells(speed, y_range, GRID[1])
    _, first = np.unique((codes * GRID[1] + upwards) * GRID[0] + across, return_index=True)
    return rows[np.sort(np.asarray(first, dtype=np.int64))]


def _find_cells(values: npt.NDArray[np.float64], bounds: tuple[float, float], number: int) -> Indices:
    low, high = bounds
    # A single plan has a range of zero.
    share = (values - low) / max(high - low, 1e-300)
    return np.clip((share * number).astype(np.int64), 0, number - 1)


class CurrentPlan(NamedTuple):
    """The current plan, and the plan of a search's grid that is marked for it."""

    plan: ss.Plan
    peak_bytes: int
    marked: ss.Plan
    """The plan itself; if it overlaps collectives by options that the grid leaves at their defaults, the plan
    without them."""
    marked_bytes: int
    note: str
    """Text of the mark."""

    @classmethod
    def create(cls, plan: ss.Plan) -> CurrentPlan:
        """Return ``plan`` with the plan that is marked for it."""
        peak_bytes, layout = plan.memory().peak_bytes, plan.layout
        usual = {name: getattr(type(layout)(), name) for name in OVERLAP if hasattr(layout, name)}
        marked = replace(plan, layout=replace_fields(layout, usual))
        if does_the_same(marked, plan):
            return cls(plan, peak_bytes, plan, peak_bytes, "this plan")
        return cls(plan, peak_bytes, marked, marked.memory().peak_bytes, "this plan without overlap")

    def is_row(self, ranking: Ranking, index: int) -> bool:
        """Return whether a row is the marked plan."""
        same_bytes = self.marked_bytes == int(ranking.peak_bytes[index])
        return same_bytes and does_the_same(ranking.plan(index), self.marked)
