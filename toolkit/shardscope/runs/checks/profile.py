"""Plans that are run without ever having been looked at under a profiler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardscope.core.finding import Finding
from shardscope.planner.checks.case import changed_task
from shardscope.runs.task_source import source_of

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.runs.run import Run


def check_profiled(plan: Plan, task: object, runs: Sequence[Run]) -> Iterator[Finding]:
    """Find a plan of which no earlier run has a trace, where the task records none either."""
    if _records(task):
        return
    mine = [run for run in runs if _plan_of(run) == plan]
    if any(_has_trace(run) for run in mine) or (task is None and not mine):
        return
    number = len(mine)
    before = f"{number} run{'s' if number > 1 else ''} of this plan and no trace" if mine else "No trace yet"
    yield Finding(
        name="never-profiled",
        severity="hint",
        why=f"{before}: what the step waits for is predicted only, and nobody has seen it.",
        number=float(number),
        change="Pretrain(profile=True), or `with ctx.profile():` in a task of your own",
        task=changed_task(task, profile=True),
    )


def _records(task: object) -> bool:
    """Whether a task records a profile by itself, or its source asks for one."""
    if getattr(task, "profile", False) is True:
        return True
    source = source_of(task)
    return source is not None and "profile(" in source


def _plan_of(run: Run) -> object:
    try:
        return run.plan
    except ValueError:  # Damaged, or of another version.
        return None


def _has_trace(run: Run) -> bool:
    return any((run.folder / "traces").glob("rank-*"))
