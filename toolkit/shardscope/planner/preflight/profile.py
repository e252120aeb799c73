"""Plans that are run without ever having been looked at under a profiler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardscope.own_code.script import source_of
from shardscope.planner.preflight.case import Case, changed_task
from shardscope.planner.preflight.finding import Finding

if TYPE_CHECKING:
    from shardscope.runs.run import Run


def never_profiled(case: Case) -> Iterator[Finding]:
    """No earlier run of this plan has a trace, and the task at hand records none."""
    if _records(case.task):
        return
    mine = [run for run in case.runs if _plan_of(run) == case.plan]
    if any(_has_trace(run) for run in mine) or (case.task is None and not mine):
        return
    number = len(mine)
    before = f"{number} run{'s' if number > 1 else ''} of this plan and no trace" if mine else "No trace yet"
    yield Finding(
        name="never-profiled",
        severity="hint",
        why=f"{before}: what the step waits for is predicted only, and nobody has seen it.",
        number=float(number),
        change="Pretrain(profile=True), or `with ctx.profile():` in a task of your own",
        task=changed_task(case.task, profile=True),
        # Of a person's own code the first line is where it can be noted.
        line=None if source_of(case.task) is None else 1,
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
