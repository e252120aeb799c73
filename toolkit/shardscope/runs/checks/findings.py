"""All findings of a plan with its task and earlier runs, and the findings in a script's text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.core.finding import SEVERITIES, Finding
from shardscope.planner import checks as preflight
from shardscope.planner.checks.case import Case, replace_task_fields
from shardscope.records.folder import RunFolder
from shardscope.runs.checks import checkpoints, data, devices, fsdp1, loading, text, training_step, vocabulary
from shardscope.runs.checks.script import MAX_CHARACTERS, Script
from shardscope.runs.task_source import check_task, read_source

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.runs.run import Run

TASK_CHECKS: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    text.check_text_length,
    loading.check_data_loading,
    vocabulary.check_vocabulary,
)
"""Checks that read a task's data or tokenizer, for which those of ``planner.checks`` are too low a layer."""
CHECKS: tuple[Callable[[Script], Iterator[Finding]], ...] = (
    data.check_sampler,
    data.check_sampler_over_all_ranks,
    data.check_set_epoch,
    training_step.check_loss_scaling,
    fsdp1.check_fsdp1,
    checkpoints.check_gathered_state,
    checkpoints.check_every_rank_saves,
    devices.check_fixed_device,
    devices.check_fixed_rank,
    devices.check_set_device,
    training_step.check_zero_grad,
)
"""Every check of a script; each yields findings with their lines."""


def collect_findings(plan: Plan, task: object = None, runs: Iterable[Run] | None = ()) -> preflight.Findings:
    """Return the findings of a plan, its task and earlier runs, as ``Plan.findings`` does."""
    earlier = _check_runs(runs)
    if task is not None:
        check_task("findings.task", task)
    case = Case(plan=plan, task=task)
    findings = [*preflight.run_checks(case), *chain.from_iterable(check(case) for check in TASK_CHECKS)]
    findings += check_profiled(plan, task, earlier)
    # The user's own function or script; built-in tasks have no source to check.
    source = read_source(task)
    if source is not None:
        findings += _run_checks(Script(source=source, plan=plan))
    return preflight.Findings(sorted(findings, key=lambda one: SEVERITIES.index(one.severity)))


def check_script(source: str, plan: Plan | None = None) -> list[Finding]:
    """Return the findings in ``source``, a training script or the text of an accelerate configuration.

    The text is only parsed, never run. Each finding has its line and the suggested replacement; with
    ``plan`` also its cost. The most severe come first. Raises ``ValueError`` if ``source`` is not text or has
    more than 2**20 characters.
    """
    if not isinstance(source, str) or len(source) > MAX_CHARACTERS:
        refuse("source", source, f"text of at most {MAX_CHARACTERS:,} characters", "Path(...).read_text()")
    findings = _run_checks(Script(source=source, plan=plan))
    return sorted(findings, key=lambda one: (SEVERITIES.index(one.severity), one.line or 0))


def _check_runs(runs: object) -> tuple[Run, ...]:
    """Return ``runs`` as a tuple of runs; None means no runs. Raises ``ValueError`` for anything else."""
    if runs is None:
        return ()
    if isinstance(runs, str | bytes) or not isinstance(runs, Iterable):
        refuse("findings.runs", runs, "several Runs", "ss.runs()")
    checked = tuple(runs)
    for number, run in enumerate(checked):
        if not {"plan", "folder"} <= set(dir(run)):
            refuse(f"findings.runs[{number}]", run, "a Run", "ss.runs()")
    return checked


def _run_checks(script: Script) -> Iterator[Finding]:
    for check in CHECKS:
        # Skip the check if the code is nested deeper than Python's recursion limit.
        with suppress(RecursionError):
            yield from check(script)


# ---- Plans that were never profiled


def check_profiled(plan: Plan, task: object, runs: Sequence[Run]) -> Iterator[Finding]:
    """Find a plan without a trace of any earlier run, if the task records none either."""
    if _records_profile(task):
        return
    # Without a task, the plan may be one of many that the user looks at: wait until one was launched.
    runs_of_plan = [run for run in runs if _read_plan(run) == plan]
    if any(_has_trace(run) for run in runs_of_plan) or (task is None and not runs_of_plan):
        return
    number = len(runs_of_plan)
    before = "No trace yet"
    if runs_of_plan:
        before = f"{number} run{'s' if number > 1 else ''} of this plan and no trace"
    recording = replace_task_fields(task, profile=True)
    change = "profile=True"
    if recording is None:
        in_function = "`with ctx.profile():` around the task's steps"
        change = "ss.Pretrain(profile=True)" if task is None else in_function
    yield Finding(
        name="never-profiled",
        severity="hint",
        why=f"{before}: the step's waiting times are only predicted, not measured.",
        number=float(number),
        change=change,
        task=recording,
    )


def _records_profile(task: object) -> bool:
    """Return whether a task records a profile, by its field or in its source."""
    if getattr(task, "profile", False) is True:
        return True
    source = read_source(task)
    return source is not None and "profile(" in source


def _read_plan(run: Run) -> object:
    try:
        return run.plan
    except ValueError:  # A damaged plan, or one of another version.
        return None


def _has_trace(run: Run) -> bool:
    return bool(RunFolder(run.folder).list_recordings())
