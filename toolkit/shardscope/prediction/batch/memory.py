"""Memory of many plans at once: the formulas of ``plan.memory()`` over columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from shardscope.core.layout import Degrees
from shardscope.memory.activations.forward import find_modules
from shardscope.memory.activations.modules.attention import broadcasts_views
from shardscope.memory.activations.rank_activations import RankActivations
from shardscope.memory.activations.stage_activations import TransformersActivations
from shardscope.memory.state.stages import StageShape
from shardscope.prediction.batch.object_batch import build_batch
from shardscope.prediction.batch.rows import Rows
from shardscope.prediction.memory import compute_peak_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.saved_tensors import Modules
    from shardscope.memory.state.stages import Stage
    from shardscope.memory.state.training_state import TrainingState

T = TypeVar("T")

_SIZES = ("micro_batch_size", "global_batch_size")
"""Recipe fields that may differ between plans that are computed in one batch."""
_DEGREES = tuple(field.name for field in fields(Degrees))
_VARYING = (*_DEGREES, "sequence_parallel", "etp")
"""Layout fields that may differ between plans that are computed in one batch."""
_DERIVED = ("splits_sequence", "expert_tp")
"""Layout properties derived from these fields by more than arithmetic, evaluated plan by plan."""


class OffloadedBytes(NamedTuple):
    """Bytes that one rank of a stage has outside GPU memory; columns for many plans."""

    host: int
    host_state: int
    """``host`` without activations."""
    nvme: int


class StageBytes(NamedTuple):
    """Bytes that one rank of a stage needs; columns for many plans."""

    peak: int
    offloaded: OffloadedBytes


def compute_stage_bytes(plan: Plan, modules: Modules, stage: Stage) -> StageBytes:
    """Return the bytes that one stage's ranks need, of one plan or of :func:`build_batch`."""
    state, rank = _compute_training_state(plan, stage), RankActivations(plan, modules)
    return StageBytes(compute_peak_bytes(rank, stage, state), _compute_offloaded_bytes(rank, stage, state))


def compute_offloaded_bytes(plan: Plan, modules: Modules, stage: Stage) -> OffloadedBytes:
    """Return what :func:`compute_stage_bytes` returns of memory outside the GPU, without the peak."""
    rank = RankActivations(plan, modules)
    return _compute_offloaded_bytes(rank, stage, _compute_training_state(plan, stage))


def _compute_training_state(plan: Plan, stage: Stage) -> TrainingState:
    from shardscope.frameworks.registry import frameworks

    return frameworks[plan.layout.framework].memory_model().compute_training_state(plan, stage)


def _compute_offloaded_bytes(rank: RankActivations, stage: Stage, state: TrainingState) -> OffloadedBytes:
    offloads = rank.plan.recipe.recompute == "offload"
    activations = TransformersActivations(rank, stage).compute_offloaded() if offloads else 0
    return OffloadedBytes(state.host_bytes + activations, state.host_bytes, state.nvme_bytes)


def compute_peaks(plans: Sequence[Plan]) -> NDArray[np.int64]:
    """Return ``plan.memory().peak_bytes`` of each plan, shape ``(len(plans),)``, exact to the byte.

    Plans that differ in degrees and batch sizes only are computed in one batch, which makes each of them
    cheaper. Raises ``ValueError`` for a plan without formulas, as :meth:`Plan.memory`.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, plan in enumerate(plans):
        groups.setdefault(_build_group_key(plan), []).append(index)
    peaks = np.zeros(len(plans), np.int64)
    for indices in groups.values():
        peaks[indices] = _compute_group_peaks([plans[index] for index in indices])
    return peaks


def _compute_group_peaks(plans: list[Plan]) -> NDArray[np.int64]:
    """Return the peaks of plans of one kind; a row is one kind of stage of one plan."""
    from shardscope.frameworks.registry import frameworks

    # One row for each kind of stage of each plan, under one key that differs by row.
    model = frameworks[plans[0].layout.framework].memory_model()
    shapes = [model.find_shapes(plan).kinds for plan in plans]
    owners = np.repeat(np.arange(len(plans)), [len(kinds) for kinds in shapes])
    rows = Rows([np.arange(len(owners))])

    def build_column(values: list[int | None]) -> int:
        return rows.build_column(1, np.array(values, np.int64))

    def merge_objects(objects: list[T], names: Sequence[str]) -> T:
        """Return the objects as one, with a column for each of the attributes ``names`` that differs."""
        differing = {}
        for name in names:
            values: list[int | None] = [getattr(item, name, None) for item in objects]
            if any(value != values[0] for value in values) and None not in values:
                differing[name] = build_column([values[owner] for owner in owners])
        return build_batch(type(objects[0]), objects[0], **differing)

    plan = build_batch(
        type(plans[0]),
        plans[0],
        recipe=merge_objects([plan.recipe for plan in plans], _SIZES),
        layout=merge_objects([plan.layout for plan in plans], (*_VARYING, *_DERIVED)),
        degrees=merge_objects([plan.degrees for plan in plans], _DEGREES),
    )
    # The formulas of one plan, over the columns.
    columns = zip(*(shape for kinds in shapes for shape in kinds), strict=True)
    shape = StageShape._make(build_column(list(values)) for values in columns)
    peaks = compute_stage_bytes(plan, find_modules(plan), model.count_weights(plan, shape)).peak
    # The worst stage of each plan: its rows are consecutive.
    first_rows = np.searchsorted(owners, np.arange(len(plans)))
    return np.maximum.reduceat(rows.expand(peaks, np.int64), first_rows)


def _build_group_key(plan: Plan) -> tuple[object, ...]:
    """Return what plans must have in common to be computed in one batch.

    It includes whether there are pipeline stages, and whether an expanded key head is a view, which math
    attention saves as such.
    """
    return (
        plan.architecture,
        plan.on_gpu,
        plan.cluster.usable_bytes_per_gpu,
        plan.cluster.gpu.name,
        plan.degrees.pp > 1,
        broadcasts_views(plan.architecture, plan.recipe.micro_batch_size),
        type(plan.layout),
        *(getattr(plan.layout, field.name) for field in fields(plan.layout) if field.name not in _VARYING),
        *(getattr(plan.recipe, field.name) for field in fields(plan.recipe) if field.name not in _SIZES),
    )
