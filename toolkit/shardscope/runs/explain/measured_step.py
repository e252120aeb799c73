"""A finished run's step time, kept beside its machine's calibration, for predictions to be held against."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from shardscope.records.files import parse_lines, read_tail
from shardscope.records.folder import RunFolder
from shardscope.timing.calibration.finished_runs import MeasuredStep, median_step
from shardscope.timing.calibration.store import store_step

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

TAIL_BYTES = 2**20
"""Of each rank's metrics the last so many are read: thousands of steps, however long the run was."""
MAX_RANKS = 8
"""Ranks whose metrics are read; steps are synchronous."""
MIN_PROFILED_STEPS = 20
"""Steps that a run with a profiler's recording must have, for the few that were recorded took longer."""


def predicted_step(plan: Plan) -> dict[str, Any] | None:
    """What ``plan.step()`` says at launch, for ``run.json``; None where it cannot say."""
    from shardscope.timing.calibration.curves import rates_for

    try:
        seconds = plan.step().seconds
        source = rates_for(plan.cluster).source
    except ValueError:
        return None
    return {"step_seconds": seconds, "from": source} if math.isfinite(seconds) and seconds > 0 else None


def keep_step(folder: RunFolder, description: Mapping[str, Any]) -> bool:
    """Keep the median step of the run in ``folder``; False where too few steps were logged to have one.

    Raises ``OSError`` where it cannot be written, and ``ValueError`` for damaged records.
    """
    found = median_step(latest_lines(folder, int(description["world_size"])))
    if found is None:
        return False
    num_steps, seconds = found
    if num_steps < MIN_PROFILED_STEPS and any(folder.traces.glob("*.json.gz")):
        return False
    plan, predicted = description["plan"], description.get("predicted") or {}
    step = MeasuredStep(
        run=str(description["name"]),
        finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        plan={noun: plan[noun] for noun in ("architecture", "cluster", "recipe", "layout")},
        num_steps=num_steps,
        seconds=seconds,
        predicted_seconds=predicted.get("step_seconds"),
        predicted_from=predicted.get("from"),
        load=_load(description),
    )
    store_step(step, str(plan["cluster"]["gpu"]["name"]))
    return True


def _load(description: Mapping[str, Any]) -> float:
    """Runnable processes for each core over the last minute; of CPU ranks, those beside them."""
    if not hasattr(os, "getloadavg"):
        return 0.0
    own = int(description["world_size"]) if description.get("device") == "cpu" else 0
    return round(max(0.0, os.getloadavg()[0] - own) / (os.cpu_count() or 1), 2)


def latest_lines(folder: RunFolder, world_size: int) -> Iterator[dict[str, Any]]:
    """What the first ranks logged last, rank by rank: enough for a median, however long the run was."""
    for rank in range(min(MAX_RANKS, world_size)):
        # The first line of a tail is rarely whole.
        yield from parse_lines(read_tail(folder.events(rank), TAIL_BYTES)).records
