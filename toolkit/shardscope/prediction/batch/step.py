"""Step time of many plans at once: the formulas of ``plan.step()`` over columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.frameworks.registry import frameworks
from shardscope.memory.activations.forward import find_modules
from shardscope.prediction.batch.column import sum_columns
from shardscope.prediction.pipeline import TIE_TOLERANCE
from shardscope.timing.calibration.curves import select_rates
from shardscope.timing.pipeline import compute_bubble_seconds
from shardscope.timing.stages import (
    PER_MICRO_BATCH_PARTS,
    PER_STEP_PARTS,
    compute_stage_seconds,
    prepare_layers,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.prediction.batch.table import Table


def compute_step_seconds(table: Table, plans: Any, stage: Any) -> NDArray[np.float64]:
    """Return ``plan.step().seconds`` of each plan of ``table``, without the transfers of paged optimizers.

    Shape ``(num_plans,)``. ``plans`` is :meth:`Table.plans`, ``stage`` the weights of its stages. Raises
    ``ValueError`` that names an unknown figure.
    """
    model = frameworks[plans.layout.framework].timing_model()
    found = compute_stage_seconds(
        prepare_layers(plans, find_modules(plans), select_rates(plans.cluster), model), stage
    )
    parts = found.parts
    through = sum_columns([parts[part] for part in PER_MICRO_BATCH_PARTS])
    busy = table.by_place(
        table.rows.spread(sum_columns([through, *(parts[part] for part in PER_STEP_PARTS)]))
    )
    flowing = table.by_place(table.rows.spread(through))
    most, every = busy[0].copy(), flowing[0] * table.num_alike[0]
    for own, flow, alike in zip(busy[1:], flowing[1:], table.num_alike[1:], strict=True):
        np.maximum(most[: len(own)], own, out=most[: len(own)])
        every[: len(own)] += flow * alike
    if len(busy) == 1:
        return table.by_plan(most)
    slowest = np.empty_like(most)
    # On ties, the first stage counts as the slowest.
    for own, flow in zip(reversed(busy), reversed(flowing), strict=True):
        np.copyto(slowest[: len(own)], flow, where=own >= TIE_TOLERANCE * most[: len(own)])
    columns = table.columns
    most = table.by_plan(most)
    all_stages: Any = table.by_plan(every)
    slowest_stage: Any = table.by_plan(slowest)
    vpp: Any = columns.get("vpp", 1)
    micro_batches: Any = table.num_micro_batches
    bubble: Any = compute_bubble_seconds(all_stages, slowest_stage, vpp, micro_batches)
    return np.where(table.num_stages > 1, most + bubble, most)
