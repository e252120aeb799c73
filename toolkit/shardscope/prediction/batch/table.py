"""Rows of one grid as formula inputs: deduplicated numbers of plans and their pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import numpy as np

from shardscope.core.layout import Degrees
from shardscope.core.plan import Plan
from shardscope.core.recipe import Recipe
from shardscope.frameworks.distinct_values import Distinct, encode_values, find_distinct_rows
from shardscope.frameworks.search_grid import DATA_PARALLEL, MICRO_BATCH_SIZE, Columns, select_rows
from shardscope.memory.activations.modules.attention import broadcasts_views
from shardscope.memory.state.stages import Stage, StageShape, StageShapes
from shardscope.prediction.batch.object_batch import build_batch
from shardscope.prediction.batch.rows import Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.layout import Layout
    from shardscope.frameworks.registry import MemoryModel

N = TypeVar("N", np.int64, np.float64)

CHUNK = 1 << 15
"""Maximum number of plans computed together; so that their columns stay in the CPU's cache."""

FEW_ROWS = 2000
"""Up to this number of rows, deduplication costs more time than it saves."""


class GridPart(NamedTuple):
    """Plans of one grid that formulas can compute together, in a :class:`Table`."""

    architecture: Architecture
    layout: Layout
    """Common fields of the layouts."""
    model: MemoryModel
    recipe: Recipe
    """Common fields of the recipes."""
    columns: Columns
    """One row per plan."""

    @property
    def num_plans(self) -> int:
        """Return the number of plans."""
        return len(self.columns[MICRO_BATCH_SIZE])

    def select_plans(self, wanted: NDArray[np.bool_]) -> GridPart:
        """Return the plans of a mask, shape ``(num_plans,)``."""
        return self._replace(columns=select_rows(self.columns, wanted))


class Table:
    """Plans while they are evaluated: one plan per row of :attr:`columns`, in :attr:`rows` one row per plan
    and kind of pipeline stage.

    A table of a large grid takes tens of MiB, so that it is created for an evaluation and not kept.
    """

    def __init__(self, part: GridPart, *, every_stage: bool = False) -> None:
        """``every_stage``: one row per pipeline stage, of equal ones too."""
        arch, layout, model, recipe, columns = part
        self.part, self.architecture, self.columns, self._model = part, arch, columns, model
        self.num_plans = part.num_plans
        self.host_memory: dict[Layout, NDArray[np.int64]] = {}
        """Host memory while models are built, independent of recomputation (``search/memory_needs.py``)."""
        self._stage_weights: dict[Layout, Stage] = {}
        self._of_every_stage: Table | None = None
        layout_fields = layout.__dataclass_fields__
        self._fields = [name for name in columns if name in layout_fields]
        self._find_stages(layout, model, every_stage=every_stage)
        self.num_micro_batches = recipe.global_batch_size // (
            columns[MICRO_BATCH_SIZE] * columns[DATA_PARALLEL]
        )
        numbers = {
            **{name: columns[name] for name in (*self._fields, MICRO_BATCH_SIZE, DATA_PARALLEL)},
            "num_micro_batches": self.num_micro_batches,
            "left": columns[DATA_PARALLEL] // columns.get("replicate", 1),
        }
        # A short table gets a single key: every column has all rows, and no distinct rows are looked for.
        if len(self.owners) <= FEW_ROWS:
            self.rows = Rows.one_by_one(len(self.owners))
            self._bits = dict.fromkeys((*numbers, "position"), 1)
            self._numbers = {
                name: self.rows.build_column(1, column[self.owners]) for name, column in numbers.items()
            }
            return
        # Otherwise each column of plans is a key, and rows of one plan are a group: all but the stage's
        # position is a property of the plan.
        codes = [encode_values(column)[0] for column in numbers.values()]
        plans = Distinct(self.num_plans, self.owners, self._firsts)
        self.rows = Rows([self.positions], plans, codes)
        self._bits = {name: 1 << bit for bit, name in enumerate((*numbers, "position"))}
        self._numbers = {
            name: self.rows.build_column_of_groups(self._bits[name], column)
            for name, column in numbers.items()
        }

    def _find_stages(self, layout: Layout, model: MemoryModel, *, every_stage: bool) -> None:
        """Create a row for each kind of pipeline stage of each plan, or for every stage."""
        # Stages depend on pp and vpp alone: shapes are found once for each distinct pair.
        columns = self.columns
        pp = columns.get("pp", np.ones(self.num_plans, np.int64))
        vpp = columns.get("vpp", np.ones(self.num_plans, np.int64))
        pipelines = find_distinct_rows([encode_values(pp), encode_values(vpp)])
        self.pipeline_of = pipelines.codes
        self.pipelines = [
            find_pipeline_shapes(self.architecture, layout, model, int(pp[row]), int(vpp[row]))
            for row in pipelines.rows
        ]
        if every_stage:
            self.pipelines = [list_every_stage(shapes) for shapes in self.pipelines]
        # Layout of the rows, from the number of kinds of stages of each plan.
        counts = np.array([len(shapes.kinds) for shapes in self.pipelines])
        offsets = np.cumsum(counts) - counts
        num_kinds = counts[self.pipeline_of]
        # First the first stages of all plans, then the second ones: reductions over stages use whole slices.
        order = np.argsort(-num_kinds, kind="stable")
        sizes = np.array([np.count_nonzero(num_kinds > position) for position in range(int(counts.max()))])
        self._starts = np.cumsum(sizes) - sizes
        """First row of each stage position."""
        self._ends = self._starts + sizes
        self.owners = np.concatenate([order[:size] for size in sizes])
        """Plan index of each row; plans with the most stages come first."""
        self._firsts = np.argsort(order)
        """Row of the first stage of each plan."""
        self.positions = np.repeat(np.arange(len(sizes)), sizes)
        # Shape of each row: ``kinds`` has those of all pipelines, of which each starts at its offset.
        kinds = np.array([kind for shapes in self.pipelines for kind in shapes.kinds], np.int64)
        kinds_of_rows = offsets[self.pipeline_of][self.owners] + self.positions
        self._shapes = kinds[kinds_of_rows]
        counts_by_kind = [np.bincount(shapes.kind_of) for shapes in self.pipelines]
        self.num_equal_stages = self.split_by_position(np.concatenate(counts_by_kind)[kinds_of_rows])
        """Number of stages of each kind, by stage position."""
        self.num_stages = np.array([len(shapes.kind_of) for shapes in self.pipelines])[self.pipeline_of]

    @property
    def of_every_stage(self) -> Table:
        """The same plans with one row per pipeline stage, of equal ones too."""
        if self._of_every_stage is None:
            self._of_every_stage = Table(self.part, every_stage=True)
        return self._of_every_stage

    def drop_unused_results(self) -> None:
        """Drop the results that were neither computed nor read since the last call.

        Of :attr:`of_every_stage` all are dropped.
        """
        self.rows.drop_unused_results()
        self._drop_every_stage()

    def clear_results(self) -> None:
        """Clear the caches of results to free memory; later calls recompute them."""
        self.rows.clear_results()
        self._drop_every_stage()

    def _drop_every_stage(self) -> None:
        # Cleared, because its columns and their cache refer to each other.
        if self._of_every_stage is not None:
            self._of_every_stage.clear_results()
            self._of_every_stage = None

    @cached_property
    def shape(self) -> StageShape:
        """Shapes of the stages, as columns."""
        keys = self._bits["position"] | self._bits.get("pp", 0) | self._bits.get("vpp", 0)
        return StageShape._make(self.rows.build_column(keys, column) for column in self._shapes.T)

    def get_number(self, name: str) -> int:
        """Return a field of the layouts as a column, or as a number if all plans have the same."""
        return self._numbers[name]

    def build_plans(self, cluster: Cluster, recipe: Recipe, layout: Layout) -> Plan:
        """Return all plans as one object with a plan's attributes, for the formulas of one plan."""
        numbers = self._numbers
        varied = build_batch(type(layout), layout, **{name: numbers[name] for name in self._fields})
        degrees = build_batch(
            Degrees, varied.fill_degrees(numbers["left"]), data_parallel=numbers[DATA_PARALLEL]
        )
        return build_batch(
            Plan,
            None,
            architecture=self.architecture,
            cluster=cluster,
            recipe=build_batch(Recipe, recipe, micro_batch_size=numbers[MICRO_BATCH_SIZE]),
            layout=varied,
            degrees=degrees,
            num_micro_batches=numbers["num_micro_batches"],
        )

    def count_weights(self, plans: Plan, layout: Layout) -> Stage:
        """Return the weights of all plans' stages, which do not depend on recomputation."""
        weights = self._stage_weights.get(layout)
        if weights is None:
            weights = self._stage_weights[layout] = self._model.count_weights(plans, self.shape)
        return weights

    def split_by_position(self, by_row: NDArray[N]) -> list[NDArray[N]]:
        """Split row values into first stages, second stages, ...; each starts with the longest pipelines."""
        return [by_row[first:end] for first, end in zip(self._starts, self._ends, strict=True)]

    def order_by_plan(self, of_first: NDArray[N]) -> NDArray[N]:
        """Reorder values of the first stages by plan, shape ``(num_plans,)``."""
        return of_first.take(self._firsts, mode="clip")

    def find_stage_rows(self, plans: NDArray[np.int64], positions: Sequence[int]) -> NDArray[np.int64]:
        """Return the rows of the stages at ``positions`` of ``plans``, shape ``(plans, positions)``."""
        rows: NDArray[np.int64] = self._firsts[plans][:, None] + self._starts[np.array(positions)]
        return rows

    def find_largest(self, by_row: NDArray[N]) -> NDArray[N]:
        """Return the maximum over each plan's stages, shape ``(num_plans,)``."""
        first, *later = self.split_by_position(by_row)
        largest = first.copy()
        for stage_values in later:
            plans = largest[: len(stage_values)]
            np.maximum(plans, stage_values, out=plans)
        return self.order_by_plan(largest)


def find_pipeline_shapes(
    arch: Architecture, layout: Layout, model: MemoryModel, pp: int, vpp: int
) -> StageShapes:
    """Return the stages of a pipeline, which depend on no degree but ``pp`` and ``vpp``."""
    degrees = Degrees(data_parallel=1, pp=pp, vpp=vpp)
    layers = tuple(layout.stage_layers(arch, degrees))
    return model.find_shapes(build_batch(Plan, None, architecture=arch, degrees=degrees, stage_layers=layers))


def list_every_stage(shapes: StageShapes) -> StageShapes:
    """Return the same stages with a separate kind for each."""
    stages = (shapes.kinds[kind]._replace(number=number) for number, kind in enumerate(shapes.kind_of))
    return StageShapes(tuple(stages), tuple(range(len(shapes.kind_of))))


def split_columns(arch: Architecture, model: MemoryModel, columns: Columns) -> Iterator[Columns]:
    """Yield groups of rows that formulas can compute together, of at most :data:`CHUNK` rows each.

    Plans whose expanded key head is a view are separate, and so are plans with and without pipeline stages if
    the framework's formulas branch on them.
    """
    number = len(columns[MICRO_BATCH_SIZE])
    # Formulas branch on both with a plain ``if``, so all plans of one group must agree.
    stages = model.branches_on_stages & (columns.get("pp", np.ones(number, np.int64)) > 1)
    views = np.broadcast_to(broadcasts_views(arch, cast("int", columns[MICRO_BATCH_SIZE])), number)
    for has_stages in (False, True):
        for has_views in (False, True):
            group = select_rows(columns, (stages == has_stages) & (views == has_views))
            for start in range(0, len(group[MICRO_BATCH_SIZE]), CHUNK):
                yield {name: column[start : start + CHUNK] for name, column in group.items()}
