"""Step time of many plans at once: the formulas of ``plan.step()`` over columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from shardscope.frameworks.registry import frameworks
from shardscope.memory.activations.forward import find_modules
from shardscope.prediction.batch.column import sum_columns
from shardscope.prediction.pipeline import TIE_TOLERANCE
from shardscope.timing.calibration.selection import select_rates
from shardscope.timing.pipeline import compute_bubble_seconds
from shardscope.timing.stages import (
    PER_MICRO_BATCH_PARTS,
    PER_STEP_PARTS,
    compute_stage_seconds,
    prepare_layers,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage
    from shardscope.prediction.batch.table import Table


def compute_step_seconds(table: Table, plans: Plan, stage: Stage) -> NDArray[np.float64]:
    """Return ``plan.step().seconds`` of each plan of ``table``, without the transfers of paged optimizers.

    Shape ``(num_plans,)``. ``plans`` is :meth:`Table.build_plans`, ``stage`` the weights of its stages.
    Raises ``ValueError`` that names an unknown figure.
    """
    # Seconds of every row: one kind of stage of one plan.
    model = frameworks[plans.layout.framework].timing_model()
    layers = prepare_layers(plans, find_modules(plans), select_rates(plans.cluster), model)
    seconds = compute_stage_seconds(layers, stage)
    parts = seconds.parts
    repeated = sum_columns([parts[part] for part in PER_MICRO_BATCH_PARTS])
    in_step = sum_columns([repeated, *(parts[part] for part in PER_STEP_PARTS)])
    # As in ``Pipeline.compute_bubble``; 0 where the schedule interleaves.
    waits = plans.num_micro_batches * seconds.first_wait
    through_stage = sum_columns([repeated, seconds.copied, waits])
    busy = table.split_by_position(table.rows.expand(in_step, np.float64))
    flowing = table.split_by_position(table.rows.expand(through_stage, np.float64))

    # Per plan: the busy seconds of its slowest stage, and the sum of all stages' micro-batch seconds.
    slowest_busy, all_flowing = busy[0].copy(), flowing[0] * table.num_equal_stages[0]
    for stage_busy, stage_flowing, num_equal in zip(
        busy[1:], flowing[1:], table.num_equal_stages[1:], strict=True
    ):
        # Plans with the longest pipelines come first: a later stage belongs to the first plans.
        num_plans = len(stage_busy)
        np.maximum(slowest_busy[:num_plans], stage_busy, out=slowest_busy[:num_plans])
        all_flowing[:num_plans] += stage_flowing * num_equal
    if len(busy) == 1:
        return table.order_by_plan(slowest_busy)

    # On ties, the first stage counts as the slowest, as in ``compute_pipeline``: it is written last.
    slowest_flowing = np.empty_like(slowest_busy)
    for stage_busy, stage_flowing in zip(reversed(busy), reversed(flowing), strict=True):
        num_plans = len(stage_busy)
        is_slowest = stage_busy >= TIE_TOLERANCE * slowest_busy[:num_plans]
        np.copyto(slowest_flowing[:num_plans], stage_flowing, where=is_slowest)

    # The formula is typed for the numbers of one plan; arrays of many plans broadcast.
    bubble = compute_bubble_seconds(
        cast("float", table.order_by_plan(all_flowing)),
        cast("float", table.order_by_plan(slowest_flowing)),
        cast("int", table.columns.get("vpp", 1)),
        cast("int", table.num_micro_batches),
    )
    step_seconds = table.order_by_plan(slowest_busy)
    return np.where(table.num_stages > 1, step_seconds + bubble, step_seconds)
