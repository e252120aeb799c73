"""Step time of many plans at once: the formulas of ``plan.step()`` over columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.frameworks.registry import frameworks
from shardscope.memory.activations.forward import find_modules
from shardscope.prediction.batch.column import sum_columns
from shardscope.prediction.pipeline import TIE_TOLERANCE
from shardscope.timing.calibration.curves import rates_for
from shardscope.timing.pipeline import bubble_seconds
from shardscope.timing.stages import FLOWING, ONCE, seconds_of, work_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.prediction.batch.table import Table


def compute_step_seconds(table: Table, plans: Any, stage: Any) -> NDArray[np.float64]:
    """Return ``plan.step().seconds`` of each plan of ``table``, without the transfers of paged optimizers.

    Shape ``(num_plans,)``. ``plans`` is :meth:`Table.plans`, ``stage`` the weights of its stages. Raises
    ``ValueError`` that names an unknown figure.
    """
    model = frameworks[plans.layout.framework].timing_model()
    parts = seconds_of(work_of(plans, find_modules(plans), rates_for(plans.cluster), model), stage).parts
    through = sum_columns([parts[part] for part in FLOWING])
    busy = table.by_place(table.rows.spread(sum_columns([through, *(parts[part] for part in ONCE)])))
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
    most, every, slowest = table.by_plan(most), table.by_plan(every), table.by_plan(slowest)
    bubble = bubble_seconds(every, slowest, columns.get("vpp", 1), table.num_micro_batches)
    return np.where(table.num_stages > 1, most + bubble, most)
