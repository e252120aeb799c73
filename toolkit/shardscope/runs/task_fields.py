"""What a task was asked, beside the plan: kept in ``run.json``, and compared between two runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.records.files import read_json
from shardscope.records.folder import FINAL, RunFolder

if TYPE_CHECKING:
    from shardscope.planner.differences import Difference
    from shardscope.runs.run import Run


OWN_TASKS = frozenset({"Pretrain", "Finetune"})


def own_task(description: Mapping[str, Any]) -> str | None:
    """Return which of Shardscope's own tasks ``run.json`` names, None for other people's code.

    The classes' modules have moved since earlier versions wrote their ``run.json``.
    """
    package, _, name = str(description.get("task")).rpartition(".")
    return name if name in OWN_TASKS and package.startswith("shardscope.training.") else None


def asked_of(task: object) -> dict[str, Any] | None:
    """The fields of a task that trains the plan's own model: numbers, choices and paths by name.

    None for a task of somebody's own, and no field that is text and no path: either may hold a token.
    """
    if getattr(task, "trains_the_plan", False) is not True or not is_dataclass(task):
        return None
    values = {field.name: getattr(task, field.name) for field in fields(task)}
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in values.items()
        if value is None or isinstance(value, bool | int | float | Path)
    }


def why_no_trace(name: str, status: str, asked: object) -> str:
    """Why the run ``name`` has none; ``asked`` as its folder keeps it, if it does."""
    if isinstance(asked, Mapping) and asked.get("profile") is True:
        how = f"{status} before" if status in FINAL else "has not come to"
        return f"The run {name} {how} the steps that are profiled: steady ones, of a short run the last."
    return (
        f"The run {name} recorded no trace: profile=True was not set, or it ended before the steps that are "
        "profiled. Nearest fix: ss.Pretrain(profile=True), or in a task of your own "
        "`with ctx.profile(): ...`."
    )


def differences_of_tasks(first: Run, second: Run) -> list[Difference]:
    """What the tasks of two runs were asked otherwise, from the first to the second.

    Another kind of task is one difference; of its fields those are compared that both have.
    """
    from shardscope.planner.differences import Difference

    before, after = _description(first), _description(second)
    kinds = [own_task(one) or one.get("task") for one in (before, after)]
    old, new = _asked(first, before), _asked(second, after)
    pairs = {name: (old[name], new[name]) for name in old if name in new}
    if all(isinstance(kind, str) for kind in kinds):
        pairs = {"task": _names(*kinds), **pairs}
    return [Difference(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]


def kept_what_was_asked(run: Run) -> bool:
    """Whether its folder says more of its task than a name and a number of steps."""
    return isinstance(_description(run).get("asked"), dict)


def _asked(run: Run, description: Mapping[str, Any]) -> dict[str, Any]:
    """A run that was launched before fields were kept has its number of steps at least."""
    kept = description.get("asked")
    steps = {} if run.num_steps is None else {"num_steps": run.num_steps}
    return {**steps, **kept} if isinstance(kept, dict) else steps


def _names(before: object, after: object) -> tuple[str, str]:
    """Without their modules, unless these are what tells them apart."""
    short = tuple(str(name).rpartition(".")[2] for name in (before, after))
    return (short[0], short[1]) if short[0] != short[1] else (str(before), str(after))


def _description(run: Run) -> dict[str, Any]:
    return read_json(RunFolder(run.folder).run_json) or {}
