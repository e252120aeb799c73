"""Recorded fields of a task (``run.json``), and their differences between two runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.records.folder import FINAL, RunFolder
from shardscope.records.json_files import read_json
from shardscope.training.tasks.text_task import TextTask

if TYPE_CHECKING:
    from shardscope.planner.differences import Difference
    from shardscope.runs.run import Run


BUILTIN_TASKS = frozenset({"Pretrain", "Finetune"})


def find_builtin_task(description: Mapping[str, object]) -> str | None:
    """Return which of Shardscope's own tasks ``run.json`` names, None for a user's own code.

    The classes' modules have moved since earlier versions wrote their ``run.json``.
    """
    package, _, name = str(description.get("task")).rpartition(".")
    return name if name in BUILTIN_TASKS and package.startswith("shardscope.training.") else None


def record_task_fields(task: object) -> dict[str, object] | None:
    """Return the numbers, flags and paths among the fields of a built-in task, by name.

    None for the user's own function. Text fields other than paths are left out, as they may contain secrets,
    but for those that the task names in ``recorded_texts``.
    """
    if getattr(task, "trains_the_plan", False) is not True or not is_dataclass(task):
        return None
    values = {field.name: getattr(task, field.name) for field in fields(task)}
    if isinstance(task, TextTask):  # A later version may resolve None to another number.
        values["num_steps"] = task.planned_steps
    texts: frozenset[str] = getattr(task, "recorded_texts", frozenset())
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in values.items()
        if value is None
        or isinstance(value, bool | int | float | Path)
        or (name in texts and _is_text(value))
    }


def _is_text(value: object) -> bool:
    """Return whether ``value`` is text, or a mapping or tuple of texts, not a table of the user's data."""
    if isinstance(value, tuple):
        return all(isinstance(text, str) for text in value)
    if isinstance(value, Mapping):
        return all(isinstance(text, str) for pair in value.items() for text in pair)
    return isinstance(value, str)


def why_no_trace(name: str, status: str, task_fields: Mapping[str, object] | None) -> str:
    """Return why the run ``name`` has no trace. ``task_fields`` are those recorded for a built-in task."""
    if task_fields is not None and task_fields.get("profile") is True:
        how = f"{status} before" if status in FINAL else "has not reached"
        return (
            f"The run {name} {how} the profiled steps: steady-state steps, or the last ones of a short run."
        )
    if status not in FINAL:
        return (
            f"The run {name}, which is {status}, has recorded no trace so far. Nearest fix: run.profile(), "
            "and run.trace() a few steps later."
        )
    return (
        f"The run {name} recorded no trace: profile=True was not set, or it ended before the profiled steps "
        "did. Nearest fix: run.profile() while it runs, profile=True in ss.Finetune or ss.Pretrain, or "
        "in a task of your own `with ctx.profile(): ...`."
    )


def compare_tasks(first: Run, second: Run) -> list[Difference]:
    """Return the differences of two runs' tasks, from the first to the second.

    A different class of task is one difference; only fields that both tasks have are compared.
    """
    from shardscope.planner.differences import Difference

    # Built-in tasks by class name, because their modules have moved; others by their qualified name.
    before, after = read_description(first), read_description(second)
    task_names = [find_builtin_task(record) or record.get("task") for record in (before, after)]
    old, new = _read_task_fields(first, before), _read_task_fields(second, after)
    pairs = {name: (old[name], new[name]) for name in old if name in new}
    if all(isinstance(name, str) for name in task_names):
        pairs = {"task": _shorten_names(*task_names), **pairs}
    return [Difference(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]


def has_task_fields(run: Run) -> bool:
    """Return whether the run folder has the fields of its task, not only its name and number of steps."""
    return isinstance(read_description(run).get("asked"), dict)


def _read_task_fields(run: Run, description: Mapping[str, object]) -> dict[str, object]:
    """Return the recorded task fields; a run of an older version has at most the number of steps."""
    recorded = description.get("asked")
    steps: dict[str, object] = {} if run.num_steps is None else {"num_steps": run.num_steps}
    return {**steps, **recorded} if isinstance(recorded, dict) else steps


def _shorten_names(before: object, after: object) -> tuple[str, str]:
    """Return two class names without their modules, unless only the modules differ."""
    short = tuple(str(name).rpartition(".")[2] for name in (before, after))
    return (short[0], short[1]) if short[0] != short[1] else (str(before), str(after))


def read_description(run: Run) -> dict[str, object]:
    """Return the run's ``run.json``; empty if it cannot be read."""
    return read_json(RunFolder(run.folder).run_json) or {}
