"""Stacks for which nothing was calibrated: reported apart."""

from __future__ import annotations

from statistics import median

from tests.accuracy.scoring import percentile
from tests.accuracy.time_scoring import TimeScore, TimeScored, absolute

from shardscope.catalog import entries


def is_calibrated(one: TimeScored) -> bool:
    """Whether products on GPUs of this generation were fitted: nobody's rows of a V100 were there for it."""
    return one.mapped.plan.cluster.gpu.architecture in entries("efficiency")["matrices"]


def apart_line(score: TimeScore) -> str:
    """The line about them; empty if there are none."""
    rows = [one for one in score.scored if not is_calibrated(one)]
    if not rows:
        return ""
    names = sorted({one.mapped.plan.cluster.gpu.name for one in rows})
    errors = absolute(rows)
    sources = len({one.source for one in rows})
    return (
        f"never calibrated ({', '.join(names)}), apart from the line below: {sources} sources, "
        f"{len(rows)} rows, median {100 * median(errors):.1f} %, p90 {100 * percentile(errors, 0.9):.1f} %"
    )
