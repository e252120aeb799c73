"""What a search asks: every grid of every framework with every recomputation that a Plan would not refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.frameworks.registry import frameworks
from shardscope.layout import Degrees
from shardscope.memory.many import Varied
from shardscope.plan import Plan
from shardscope.planner.grid import MICRO_BATCH_SIZE, Columns, Grid, allowed
from shardscope.planner.table import Table, split
from shardscope.support import check_supported, supported

if TYPE_CHECKING:
    from shardscope.architecture import Architecture
    from shardscope.cluster import Cluster
    from shardscope.layout import Layout
    from shardscope.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Plans of one framework that differ in whole numbers only."""

    layout: Layout
    """What their layouts have in common."""
    recipe: Recipe
    """What their recipes have in common: all but the micro-batch."""
    table: Table

    @property
    def num_plans(self) -> int:
        """How many there are."""
        return self.table.num_plans

    def plan(self, cluster: Cluster, row: int) -> Plan:
        """One of them, made as a person would make it."""
        numbers = {name: int(column[row]) for name, column in self.table.columns.items()}
        own = self.layout.__dataclass_fields__
        layout = replace(self.layout, **{name: number for name, number in numbers.items() if name in own})
        recipe = replace(self.recipe, micro_batch_size=numbers[MICRO_BATCH_SIZE])
        return Plan(self.table.architecture, cluster, recipe, layout)


def candidates_of(name: str, arch: Architecture, cluster: Cluster, recipe: Recipe) -> Iterator[Candidates]:
    """All that a framework offers.

    Raises ``ValueError`` for an architecture that it has no layers for.
    """
    framework = frameworks[name]
    grids: list[Grid] = import_module(f"shardscope.frameworks.{name}.grid").grids(arch, cluster, recipe)
    tables: dict[tuple[int, ...], list[Table]] = {}
    parts: dict[tuple[int, bytes], Columns] = {}
    for recompute in supported(framework.layout_class, "recompute"):
        try:
            again = _recomputing(recipe, recompute)
        except ValueError:
            continue
        for grid in grids:
            if not len(grid.columns[MICRO_BATCH_SIZE]):
                continue
            try:
                layout: Any = grid.layout.settled(arch, cluster, again)
                grid.check(layout, again)
            except ValueError:
                continue
            columns = _supported(arch, cluster, again, layout, grid.columns, parts)
            if not len(columns[MICRO_BATCH_SIZE]):
                continue
            if (id(columns),) not in tables:
                model = framework.memory_model()
                tables[id(columns),] = [
                    Table(arch, layout, model, recipe, piece) for piece in split(arch, columns)
                ]
            for table in tables[id(columns),]:
                yield Candidates(layout=layout, recipe=again, table=table)


def _recomputing(recipe: Recipe, recompute: Any) -> Recipe:
    interval = 1 if recompute == "none" else recipe.recompute_interval
    return replace(recipe, recompute=recompute, recompute_interval=interval, micro_batch_size=1)


def _supported(
    arch: Architecture,
    cluster: Cluster,
    recipe: Recipe,
    layout: Layout,
    columns: Columns,
    parts: dict[tuple[int, bytes], Columns],
) -> Columns:
    """The rows that the framework can run this recipe in: it matters which degrees are above 1, no more."""
    names = [name for name in ("tp", "cp", "ep") if name in columns]
    above = {name: np.minimum(columns[name], 2) for name in names} | {"row": columns[MICRO_BATCH_SIZE] * 0}

    def check(*numbers: int) -> None:
        degrees = dict(zip(names, numbers, strict=False))
        plan: Any = Varied(
            Plan,
            None,
            architecture=arch,
            cluster=cluster,
            recipe=recipe,
            layout=Varied(type(layout), layout, **degrees),
            degrees=Degrees(data_parallel=1, **degrees),
        )
        check_supported(plan)

    above["index"] = np.arange(len(above["row"]))
    rows = allowed(above, [*names, "row"], check)["index"]
    if len(rows) == len(above["index"]):
        return columns
    key = id(columns), rows.tobytes()
    if key not in parts:
        parts[key] = {name: column[rows] for name, column in columns.items()}
    return parts[key]
