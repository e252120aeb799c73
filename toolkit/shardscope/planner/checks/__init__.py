"""The preflight: what of a plan or a task runs, but badly, and the suggested fix.

Scripts, functions and earlier runs are checked by ``shardscope.runs.checks``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.core.finding import SEVERITIES, Finding, Severity
from shardscope.core.html_table import html_table
from shardscope.planner.checks import (
    checkpoints,
    data,
    learning_rate,
    loading,
    options,
    overlap,
    pipeline,
    precision,
    recomputation,
    room,
    sharding,
    tensor_parallel,
    widths,
)
from shardscope.planner.checks.case import Case

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.runs.run import Run

__all__ = ["CHECKS", "SEVERITIES", "Finding", "Findings", "Severity", "check_runs", "findings"]

CHECKS: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    room.no_room,
    room.nearly_full,
    recomputation.recomputation_off,
    recomputation.recomputation_on,
    pipeline.few_micro_batches,
    tensor_parallel.slow_tensor_parallel,
    sharding.gathered_twice,
    sharding.too_fine,
    overlap.overlap_off,
    options.without_use,
    precision.narrow_fp16,
    precision.missing_bf16,
    precision.rounded_reductions,
    precision.lost_updates,
    widths.misses_matrix_units,
    widths.slower_off_cache_lines,
    widths.padded_vocabulary,
    checkpoints.tied_checkpoints,
    checkpoints.resumed,
    learning_rate.rate_against_batch,
    learning_rate.short_warm_up,
    data.same_windows,
    loading.starved,
)
"""Every check; each looks at one thing."""


class Findings(list[Finding]):
    """A list of findings that shows itself as a table at the end of a notebook cell."""

    def _repr_html_(self) -> str:
        if not self:
            return "<p>No findings.</p>"
        rows = [(one.severity, one.name.replace("-", " "), one.why, one.change) for one in self]
        return html_table(("severity", "finding", "why", "suggested fix"), rows)


def findings(plan: Plan, task: object = None, runs: Iterable[Run] | None = ()) -> Findings:
    """Return the findings of ``plan`` and of the fields of ``task``, the worst first."""
    case = Case(plan=plan, task=task, runs=check_runs(runs))
    found = [finding for check in CHECKS for finding in check(case)]
    return Findings(sorted(found, key=lambda one: SEVERITIES.index(one.severity)))


def check_runs(runs: object) -> tuple[Run, ...]:
    """``runs`` as Runs; None is none of them. Raises ``ValueError`` for anything else."""
    if runs is None:
        return ()
    if isinstance(runs, str | bytes) or not isinstance(runs, Iterable):
        refuse("findings.runs", runs, "several Runs", "ss.runs()")
    found = tuple(runs)
    for number, run in enumerate(found):
        if not {"plan", "folder"} <= set(dir(run)):
            refuse(f"findings.runs[{number}]", run, "a Run", "ss.runs()")
    return found
