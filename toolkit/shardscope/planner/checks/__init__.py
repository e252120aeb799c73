"""Checks of a plan and its task: each finding says what runs badly and suggests a fix.

Scripts, functions and earlier runs are checked by ``shardscope.runs.checks``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardscope.core.finding import SEVERITIES, Finding, Severity
from shardscope.core.html_table import html_table
from shardscope.planner.checks import (
    checkpoints,
    learning_rate,
    memory,
    options,
    pipeline,
    precision,
    recomputation,
    sharding,
    tensor_parallel,
    widths,
)
from shardscope.planner.checks.case import Case

__all__ = ["CHECKS", "SEVERITIES", "Finding", "Findings", "Severity", "findings"]

CHECKS: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    memory.no_room,
    memory.nearly_full,
    recomputation.recomputation_off,
    recomputation.recomputation_on,
    pipeline.few_micro_batches,
    tensor_parallel.slow_tensor_parallel,
    sharding.gathered_twice,
    sharding.too_fine,
    options.overlap_off,
    options.without_use,
    precision.narrow_fp16,
    precision.missing_bf16,
    precision.rounded_reductions,
    precision.lost_updates,
    widths.misses_matrix_units,
    widths.slower_off_cache_lines,
    widths.padded_vocabulary,
    checkpoints.tied_checkpoints,
    checkpoints.check_resumed,
    learning_rate.rate_against_batch,
    learning_rate.short_warm_up,
)
"""All checks; each covers one topic."""


class Findings(list[Finding]):
    """A list of findings, displayed as a table at the end of a notebook cell."""

    def _repr_html_(self) -> str:
        if not self:
            return "<p>No findings.</p>"
        rows = [(one.severity, one.name.replace("-", " "), one.why, one.change) for one in self]
        return html_table(("severity", "finding", "why", "suggested fix"), rows)


def findings(case: Case) -> Findings:
    """Return the findings for a plan and for the fields of its task, the most severe first."""
    results = [finding for check in CHECKS for finding in check(case)]
    return Findings(sorted(results, key=lambda one: SEVERITIES.index(one.severity)))
