"""Stacks for which nothing was calibrated: reported apart."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from tests.accuracy.row_plans import Mapped
from tests.accuracy.scoring import percentile
from tests.accuracy.time_scoring import TimeScore, TimeScored, absolute, counted, summary

from shardscope.catalog import load_efficiency

OTHER_FRAMEWORKS = ("nanotron",)
"""Frameworks that are none of ours: their rows are planned as the nearest of ours, and never fitted on."""


def is_calibrated(mapped: Mapped) -> bool:
    """Return whether the framework is one of ours, and products on GPUs of this generation were fitted."""
    generations = load_efficiency()["matrices"]
    return mapped.framework not in OTHER_FRAMEWORKS and mapped.plan.cluster.gpu.architecture in generations


def calibrated(score: TimeScore) -> TimeScore:
    """Without the stacks for which nothing was calibrated."""
    return TimeScore(tuple(one for one in score.scored if is_calibrated(one.mapped)), score.unmapped)


def described_line(score: TimeScore) -> str:
    """The closing line's figures with foreign code described, which no plan says."""
    known = calibrated(score)
    found = summary(known.by_source)
    if found is None:
        return ""
    return (
        f"with what ran beside it described: {counted(known)}, "
        f"median of source medians {100 * found[0]:.1f} %, p90 {100 * found[1]:.1f} %"
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
        f"{len(rows)} rows, median {100 * median(absolute(rows)):.1f} %, "
        f"p90 {100 * percentile(absolute(rows), 0.9):.1f} %"
        for name, rows in sorted(stacks.items())
    ]
    found = summary(score.by_source)
    assert found is not None
    lines.append(
        f"with them: {counted(score)}, median of source medians {100 * found[0]:.1f} %, "
        f"p90 {100 * found[1]:.1f} %"
    )
    return "\n\n".join(lines)
