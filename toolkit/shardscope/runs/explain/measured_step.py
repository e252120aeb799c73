"""Step times of finished runs, stored with the machine's calibration to compare predictions with."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from shardscope.core.errors import check_integer
from shardscope.records.folder import RunFolder
from shardscope.records.folder_checks import MAX_WORLD_SIZE
from shardscope.records.json_files import parse_lines, read_tail
from shardscope.timing.calibration.finished_runs import MeasuredStep, compute_median_step
from shardscope.timing.calibration.store import store_step

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

TAIL_BYTES = 2**20
"""Bytes read from the end of each rank's metrics: thousands of steps, for a run of any length."""
MAX_RANKS = 8
"""Maximum number of ranks whose metrics are read; a few are enough, because steps are synchronous."""
MIN_PROFILED_STEPS = 20
"""Minimum number of steps of a profiled run: the few profiled steps are slower than the others."""


def predict_step(plan: Plan) -> dict[str, object] | None:
    """Return the prediction of ``plan.step()`` at launch, for ``run.json``; None if there is none."""
    from shardscope.timing.calibration.selection import select_rates

    try:
        seconds = plan.step().seconds
        source = select_rates(plan.cluster).source
    except ValueError:
        return None
    return {"step_seconds": seconds, "from": source} if math.isfinite(seconds) and seconds > 0 else None


def store_measured_step(folder: RunFolder, description: Mapping[str, object]) -> bool:
    """Store the median step time of the run in ``folder``. Return False if too few steps were logged.

    Raises ``OSError`` if it cannot be written and ``ValueError`` for damaged records.
    """
    world_size = check_integer("world_size", description.get("world_size"), low=1, high=MAX_WORLD_SIZE)
    measured = compute_median_step(read_latest_records(folder, world_size))
    if measured is None:
        return False
    num_steps, seconds = measured
    # The profiler slows its steps down. In a long run they do not change the median.
    if num_steps < MIN_PROFILED_STEPS and folder.list_recordings():
        return False
    # run.json may have been edited, or be of an older version.
    plan, predicted = description.get("plan"), description.get("predicted")
    if not isinstance(plan, dict):
        raise ValueError("run.json has no plan")
    if not isinstance(predicted, dict):
        predicted = {}
    step = MeasuredStep(
        run=str(description["name"]),
        finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        plan={noun: plan[noun] for noun in ("architecture", "cluster", "recipe", "layout")},
        num_steps=num_steps,
        seconds=seconds,
        predicted_seconds=predicted.get("step_seconds"),
        predicted_from=predicted.get("from"),
        load=_measure_load(world_size if description.get("device") == "cpu" else 0),
    )
    store_step(step, str(plan["cluster"]["gpu"]["name"]))
    return True


def _measure_load(num_cpu_ranks: int) -> float:
    """Return the load average per core over the last minute, this run's CPU ranks excluded."""
    if not hasattr(os, "getloadavg"):
        return 0.0
    return round(max(0.0, os.getloadavg()[0] - num_cpu_ranks) / (os.cpu_count() or 1), 2)


def read_latest_records(folder: RunFolder, world_size: int) -> Iterator[dict[str, object]]:
    """Yield the latest records of the first ``MAX_RANKS`` ranks, rank by rank: enough for a median."""
    for rank in range(min(MAX_RANKS, world_size)):
        # The first line of a tail is usually incomplete, and `parse_lines` skips it.
        yield from parse_lines(read_tail(folder.events(rank), TAIL_BYTES)).records
