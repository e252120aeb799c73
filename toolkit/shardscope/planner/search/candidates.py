"""Candidate plans of a search: all grids of all frameworks, with every supported recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardscope.core.fixes import without_fix_search
from shardscope.core.layout import Degrees
from shardscope.core.plan import Plan
from shardscope.core.serialization import replace_fields
from shardscope.frameworks.registry import frameworks
from shardscope.frameworks.search_grid import MICRO_BATCH_SIZE, Columns, Grid, select_rows
from shardscope.prediction.batch.deduplicate import find_distinct
from shardscope.prediction.batch.object_batch import build_batch
from shardscope.prediction.batch.table import GridPart, split_columns
from shardscope.prediction.support import check_supported, list_supported

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    runnable = _Supported(arch, cluster)
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
            columns = runnable.select_supported(grid.columns, again, layout)
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


class _Supported:
    """Selection of the rows of a framework's grids that can run a recipe, by which degrees are above 1.

    Grids share columns: the combinations of degrees in their rows, and the selected rows, are computed once.
    """

    def __init__(self, arch: Architecture, cluster: Cluster) -> None:
        self._arch, self._cluster = arch, cluster
        self._above: dict[int, tuple[list[dict[str, int]], NDArray[np.int64]]] = {}
        self._parts: dict[tuple[int, bytes], Columns] = {}

    def select_supported(self, columns: Columns, recipe: Recipe, layout: Layout) -> Columns:
        """Return the rows of ``columns`` that are valid plans; the same object if all are."""
        if id(columns) not in self._above:
            self._above[id(columns)] = _find_degrees_above_one(columns)
        # Whether a plan is supported depends on which degrees are above 1, not on their size: check each
        # combination once instead of each row.
        kinds, kind_of = self._above[id(columns)]
        with without_fix_search():  # the fixes are not used
            can_run = np.array([self._can_run(recipe, layout, degrees) for degrees in kinds])
        if can_run.all():
            return columns
        key = id(columns), can_run.tobytes()
        if key not in self._parts:
            self._parts[key] = select_rows(columns, can_run[kind_of])
        return self._parts[key]

    def _can_run(self, recipe: Recipe, layout: Layout, degrees: dict[str, int]) -> bool:
        plan = build_batch(
            Plan,
            None,
            architecture=self._arch,
            cluster=self._cluster,
            recipe=recipe,
            layout=build_batch(type(layout), layout, **degrees),
            degrees=Degrees(data_parallel=1, **degrees),
        )
        try:
            check_supported(plan)
        except ValueError:
            return False
        return True


def _find_degrees_above_one(columns: Columns) -> tuple[list[dict[str, int]], NDArray[np.int64]]:
    """Return all combinations of degrees above 1 (written as 1 and 2), and the combination of each row."""
    # Other degrees have no such rules across recipe and layout (prediction/support.py).
    names: list[str] = [name for name in ("tp", "pp", "cp", "ep") if name in columns]
    kind_of = np.zeros(len(columns[MICRO_BATCH_SIZE]), np.int64)
    for name in names:
        kind_of = 2 * kind_of + (columns[name] > 1)
    distinct = find_distinct(kind_of, 2 ** len(names))
    kinds = [{name: min(int(columns[name][row]), 2) for name in names} for row in distinct.rows]
    return kinds, distinct.codes
