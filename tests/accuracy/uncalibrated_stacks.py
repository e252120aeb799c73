"""Frameworks and GPUs without calibrated constants, which are reported separately."""

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
"""Frameworks that Shardscope does not model: planned as the closest supported one, never used for fitting."""


def is_calibrated(mapped: Mapped) -> bool:
    """Return whether the framework is supported and matmul rates of its GPU generation were fitted."""
    generations = load_efficiency()["matrices"]
    return mapped.framework not in OTHER_FRAMEWORKS and mapped.plan.cluster.gpu.architecture in generations


def select_calibrated(score: TimeScore) -> TimeScore:
    """Select the rows of calibrated frameworks and GPUs."""
    return TimeScore(tuple(one for one in score.scored if is_calibrated(one.mapped)), score.unmapped)


def own_code_line(score: TimeScore) -> str:
    """Return the figures of the last line with the publishers' code modelled."""
    known = select_calibrated(score)
    summaries = summarize_groups(known.by_source)
    if summaries is None:
        return ""
    return (
        f"with publisher's code: {count_scored(known)}, "
        f"median of source medians {100 * summaries[0]:.1f} %, p90 {100 * summaries[1]:.1f} %"
    )


def uncalibrated_lines(score: TimeScore) -> str:
    """Return a line for each uncalibrated stack, and one for all rows; empty if there are none."""
    stacks: dict[str, list[TimeScored]] = defaultdict(list)
    for one in score.scored:
        if not is_calibrated(one.mapped):
            other = one.mapped.framework in OTHER_FRAMEWORKS
            stacks[one.mapped.framework if other else one.mapped.plan.cluster.gpu.name].append(one)
    if not stacks:
        return ""
    lines = [
        f"not calibrated, not in the last line: {name}, {len({one.source for one in rows})} sources, "
        f"{len(rows)} rows, median {100 * median(sort_absolute_errors(rows)):.1f} %, "
        f"p90 {100 * compute_percentile(sort_absolute_errors(rows), 0.9):.1f} %"
        for name, rows in sorted(stacks.items())
    ]
    summaries = summarize_groups(score.by_source)
    assert summaries is not None
    lines.append(
        f"all rows, those included: {count_scored(score)}, "
        f"median of source medians {100 * summaries[0]:.1f} %, p90 {100 * summaries[1]:.1f} %"
    )
    return "\n\n".join(lines)
