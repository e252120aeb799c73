"""Candidate plans of a search: all grids of all frameworks, with every supported recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shardscope.core.layout import Degrees
from shardscope.core.plan import Plan
from shardscope.core.serialization import replace_fields
from shardscope.frameworks.registry import frameworks
from shardscope.frameworks.search_grid import MICRO_BATCH_SIZE, Columns, DegreeFilter, Grid, select_rows
from shardscope.prediction.batch.object_batch import build_batch
from shardscope.prediction.batch.table import GridPart, split_columns
from shardscope.prediction.support import check_supported, list_supported

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.layout import Layout
    from shardscope.core.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Plans of one framework that differ in whole numbers only."""

    layout: Layout
    """Common fields of the layouts."""
    recipe: Recipe
    """Common fields of the recipes: all but the micro-batch."""
    part: GridPart
    """Their numbers. Several candidates may share them."""

    @property
    def num_plans(self) -> int:
        """Return the number of plans."""
        return self.part.num_plans

    def build_plan(self, cluster: Cluster, row: int) -> Plan:
        """Return the plan of a row, created and checked like any other plan."""
        # Columns that are not layout fields (data_parallel, sequences_at_once) follow from the others.
        numbers = {name: int(column[row]) for name, column in self.part.columns.items()}
        layout_fields = self.layout.__dataclass_fields__
        layout = replace(
            self.layout, **{name: number for name, number in numbers.items() if name in layout_fields}
        )
        recipe = replace(self.recipe, micro_batch_size=numbers[MICRO_BATCH_SIZE])
        return Plan(self.part.architecture, cluster, recipe, layout)


def list_candidates(
    name: str,
    arch: Architecture,
    cluster: Cluster,
    recipe: Recipe,
    *,
    recompute: Sequence[str] | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
) -> Iterator[Candidates]:
    """Yield all candidates of a framework, with these kinds of recomputation and micro-batches (None: all).

    Raises ``ValueError`` for an architecture that the framework does not support.
    """
    # 1. The grid of layouts. Its columns are shared between grids, so results are cached by the columns'
    # identity.
    framework = frameworks[name]
    grids = framework.build_grids(arch, cluster, recipe)
    parts: dict[int, list[GridPart]] = {}
    if micro_batch_sizes is not None:
        grids = _with_micro_batches(grids, micro_batch_sizes)
    degree_filter = DegreeFilter()
    # 2. Combine each grid with every recomputation that the framework supports.
    for value in list_supported(framework.layout_class, "recompute"):
        if recompute is not None and value not in recompute:
            continue
        try:
            again = _with_recompute(recipe, value)
        except ValueError:
            continue
        for grid in grids:
            if not len(grid.columns[MICRO_BATCH_SIZE]):
                continue
            try:
                # Derive the options that are left open, then drop whole grids, then rows, that cannot run
                # this recipe.
                layout = grid.layout.resolve_options(arch, cluster, again)
                grid.check(layout, again)
            except ValueError:
                continue
            columns = degree_filter.select(
                grid.columns, partial(_check_degrees, arch, cluster, again, layout)
            )
            if not len(columns[MICRO_BATCH_SIZE]):
                continue
            # 3. The same parts for all recipes and layouts of the same rows: stages and weights are computed
            # once for all.
            if id(columns) not in parts:
                model = framework.memory_model()
                parts[id(columns)] = [
                    GridPart(arch, layout, model, recipe, piece)
                    for piece in split_columns(arch, model, columns)
                ]
            for part in parts[id(columns)]:
                yield Candidates(layout=layout, recipe=again, part=part)


def group_by_part(candidates: Sequence[Candidates]) -> list[list[int]]:
    """Return the indices of all candidates, grouped by part: those of one part share most numbers."""
    # By identity, because arrays are not comparable.
    parts: dict[int, list[int]] = {}
    for index, one in enumerate(candidates):
        parts.setdefault(id(one.part), []).append(index)
    return list(parts.values())


def _with_micro_batches(grids: list[Grid], sizes: Sequence[int]) -> list[Grid]:
    """Return the grids' rows with these micro-batch sizes. Grids that share columns still share them."""
    columns: dict[int, Columns] = {}
    for grid in grids:
        if id(grid.columns) not in columns:
            wanted = np.isin(grid.columns[MICRO_BATCH_SIZE], sizes)
            columns[id(grid.columns)] = select_rows(grid.columns, wanted)
    return [replace(grid, columns=columns[id(grid.columns)]) for grid in grids]


def _with_recompute(recipe: Recipe, recompute: object) -> Recipe:
    # The micro-batch is a column, so the common recipe has a neutral one.
    interval = 1 if recompute == "none" else recipe.recompute_interval
    changes = {"recompute": recompute, "recompute_interval": interval, "micro_batch_size": 1}
    return replace_fields(recipe, changes)


def _check_degrees(
    arch: Architecture, cluster: Cluster, recipe: Recipe, layout: Layout, degrees: Mapping[str, int]
) -> None:
    """Raise ``ValueError`` if no plan with these degrees above 1 runs the recipe.

    Whether a plan is supported depends on which degrees are above 1, not on their size, and on no other
    degree (``prediction/support.py``).
    """
    plan = build_batch(
        Plan,
        None,
        architecture=arch,
        cluster=cluster,
        recipe=recipe,
        layout=build_batch(type(layout), layout, **degrees),
        degrees=Degrees(data_parallel=1, **degrees),
    )
    check_supported(plan)
