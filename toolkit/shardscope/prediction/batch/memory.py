"""Memory of many plans at once: the formulas of ``plan.memory()`` over columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardscope.core.layout import Degrees
from shardscope.memory.activations.forward import find_modules
from shardscope.memory.activations.modules.attention import broadcasts_views
from shardscope.memory.activations.stage_activations import TransformersActivations
from shardscope.memory.state.stages import StageShape
from shardscope.prediction.batch.object_batch import ObjectBatch
from shardscope.prediction.batch.rows import Rows
from shardscope.prediction.memory import compute_peak_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.saved import Modules
    from shardscope.memory.state.stages import Stage

_SIZES = ("micro_batch_size", "global_batch_size")
"""Recipe fields that may differ between plans that are computed batch."""
_DEGREES = tuple(field.name for field in fields(Degrees))
_SPREAD = (*_DEGREES, "sequence_parallel", "etp")
"""Layout fields that may differ between plans that are computed batch."""
_DERIVED = ("splits_sequence", "expert_tp")
"""Layout properties derived from these fields by more than arithmetic, evaluated plan by plan."""


class StageBytes(NamedTuple):
    """Bytes that one rank of a stage needs; columns for many plans."""

    peak: Any
    host: Any
    host_state: Any
    """``host`` without activations."""
    nvme: Any


def compute_stage_bytes(plan: Any, modules: Modules, stage: Stage) -> StageBytes:
    """Return the peak, host and NVMe bytes of one stage's ranks. ``plan`` may be :class:`ObjectBatch`."""
    from shardscope.frameworks.registry import frameworks

    state = frameworks[plan.layout.framework].memory_model().compute_training_state(plan, stage)
    peak = compute_peak_bytes(plan, modules, stage, state)
    offloads = plan.recipe.recompute == "offload"
    offloaded = TransformersActivations(plan, modules, stage).compute_offloaded() if offloads else 0
    return StageBytes(peak, state.host_bytes + offloaded, state.host_bytes, state.nvme_bytes)


def compute_peaks(plans: Sequence[Plan]) -> NDArray[np.int64]:
    """Return ``plan.memory().peak_bytes`` of each plan, shape ``(len(plans),)``, exact to the byte.

    Plans that differ in degrees and batch sizes only are computed batch, which makes each of them cheaper.
    Raises ``ValueError`` for a plan without formulas, as :meth:`Plan.memory`.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, plan in enumerate(plans):
        groups.setdefault(_build_group_key(plan), []).append(index)
    peaks = np.zeros(len(plans), np.int64)
    for indices in groups.values():
        peaks[indices] = _compute_group_peaks([plans[index] for index in indices])
    return peaks


def _compute_group_peaks(plans: list[Plan]) -> NDArray[np.int64]:
    """Return the peaks of plans of one kind; a row is one kind of stage of one plan."""
    from shardscope.frameworks.registry import frameworks

    model = frameworks[plans[0].layout.framework].memory_model()
    shapes = [model.find_shapes(plan).kinds for plan in plans]
    owners = np.repeat(np.arange(len(plans)), [len(kinds) for kinds in shapes])
    rows = Rows([np.arange(len(owners))])

    def build_column(values: list[Any]) -> Any:
        return rows.column(1, np.array(values, np.int64))

    def build_batch(objects: list[Any], names: Sequence[str]) -> ObjectBatch:
        differing = {}
        for name in names:
            values = [getattr(item, name, None) for item in objects]
            if any(value != values[0] for value in values) and None not in values:
                differing[name] = build_column([values[owner] for owner in owners])
        return ObjectBatch(type(objects[0]), objects[0], **differing)

    first = plans[0]
    batch = ObjectBatch(
        type(first),
        first,
        recipe=build_batch([plan.recipe for plan in plans], _SIZES),
        layout=build_batch([plan.layout for plan in plans], (*_SPREAD, *_DERIVED)),
        degrees=build_batch([plan.degrees for plan in plans], _DEGREES),
    )
    columns = zip(*(shape for kinds in shapes for shape in kinds), strict=True)
    shape: Any = StageShape(*(build_column(list(values)) for values in columns))
    plan: Any = batch
    peaks = compute_stage_bytes(plan, find_modules(plan), model.count_weights(plan, shape)).peak
    starts = np.searchsorted(owners, np.arange(len(plans)))
    return np.maximum.reduceat(rows.spread(peaks), starts)


def _build_group_key(plan: Plan) -> tuple[Any, ...]:
    """Return what plans must have in common to be computed batch.

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
        *(getattr(plan.layout, field.name) for field in fields(plan.layout) if field.name not in _SPREAD),
        *(getattr(plan.recipe, field.name) for field in fields(plan.recipe) if field.name not in _SIZES),
    )
