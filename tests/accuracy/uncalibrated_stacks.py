"""Stacks for which nothing was calibrated: reported apart."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from tests.accuracy.row_plans import Mapped
from tests.accuracy.scoring import compute_percentile
from tests.accuracy.time_scoring import (
    TimeScore,
    TimeScored,
    count_scored,
    sort_absolute_errors,
    summarize_groups,
)

from shardscope.catalog import load_efficiency

OTHER_FRAMEWORKS = ("nanotron",)
"""Frameworks that are none of ours: their rows are planned as the nearest of ours, and never fitted on."""


def is_calibrated(mapped: Mapped) -> bool:
    """Return whether the framework is one of ours, and products on GPUs of this generation were fitted."""
    generations = load_efficiency()["matrices"]
    return mapped.framework not in OTHER_FRAMEWORKS and mapped.plan.cluster.gpu.architecture in generations


def select_calibrated(score: TimeScore) -> TimeScore:
    """Select the rows of stacks for which something was calibrated."""
    return TimeScore(tuple(one for one in score.scored if is_calibrated(one.mapped)), score.unmapped)


def described_line(score: TimeScore) -> str:
    """The closing line's figures with foreign code described, which no plan says."""
    known = select_calibrated(score)
    summaries = summarize_groups(known.by_source)
    if summaries is None:
        return ""
    return (
        f"with what ran beside it described: {count_scored(known)}, "
        f"median of source medians {100 * summaries[0]:.1f} %, p90 {100 * summaries[1]:.1f} %"
    )


def apart_lines(score: TimeScore) -> str:
    """A line for each such stack, and one for all rows together; empty if there are none."""
    stacks: dict[str, list[TimeScored]] = defaultdict(list)
    for one in score.scored:
        if not is_calibrated(one.mapped):
            other = one.mapped.framework in OTHER_FRAMEWORKS
            stacks[one.mapped.framework if other else one.mapped.plan.cluster.gpu.name].append(one)
    if not stacks:
        return ""
    lines = [
        f"never calibrated, apart from the last line: {name}, {len({one.source for one in rows})} sources, "
        f"{len(rows)} rows, median {100 * median(sort_absolute_errors(rows)):.1f} %, "
        f"p90 {100 * compute_percentile(sort_absolute_errors(rows), 0.9):.1f} %"
        for name, rows in sorted(stacks.items())
    ]
    summaries = summarize_groups(score.by_source)
    assert summaries is not None
    lines.append(
        f"with them: {count_scored(score)}, median of source medians {100 * summaries[0]:.1f} %, "
        f"p90 {100 * summaries[1]:.1f} %"
    )
    return "\n\n".join(lines)
