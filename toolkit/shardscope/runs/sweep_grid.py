"""The grid of a sweep: which fields are swept, the combinations of their values, and the runs' names."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import FieldError, check_choice, refuse
from shardscope.runs.launch.launch_checks import MAX_NAME_LENGTH

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.runs.launch.context import Context

MAX_RUNS = 64
"""Maximum number of combinations: a sweep is small, and each is a run with a folder."""
HASH_LENGTH = 8
VALUES = "numbers, True, False, None, texts, paths, or sequences of texts"

FieldValue = bool | int | float | str | Path | tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One combination of values: the plan, the task and the name of its run."""

    name: str
    values: Mapping[str, FieldValue]
    """Values by the names of ``over``."""
    plan: Plan
    task: Callable[[Context], object]


def build_grid(
    plan: Plan, task: Callable[[Context], object], over: Mapping[str, Iterable[FieldValue]], name: str
) -> list[Combination]:
    """Return the product of the values in ``over``, the last field varying fastest.

    Raises ``ValueError`` for a field that neither the plan's recipe nor the task has (or both have), for
    values that are no list or occur twice, for more than :data:`MAX_RUNS` combinations, and for one that the
    recipe, the plan or the task refuses.
    """
    example = 'over={"learning_rate": [1e-4, 2e-4]}'
    if not isinstance(over, Mapping) or not over:
        refuse("sweep.over", over, "a mapping of field names to lists of values", example)
    targets = {key: _find_field(key, plan, task) for key in over}
    if len(set(targets.values())) < len(targets):
        refuse("sweep.over", list(over), "each field once", example)
    columns = {key: _read_values(key, values) for key, values in over.items()}
    num_runs = math.prod(map(len, columns.values()))
    if num_runs > MAX_RUNS:
        refuse("sweep.over", f"{num_runs:,} combinations", f"1 to {MAX_RUNS}", "fewer values")
    grid = [dict(zip(columns, values, strict=True)) for values in itertools.product(*columns.values())]
    names = _name_runs(name, grid)
    return [
        _build_combination(plan, task, targets, values, run_name)
        for values, run_name in zip(grid, names, strict=True)
    ]


def format_values(values: Mapping[str, FieldValue]) -> str:
    """Return ``learning_rate=0.0001,lora_rank=8``."""
    return ",".join(f"{key.rpartition('.')[2]}={format_value(value)}" for key, value in values.items())


def format_value(value: FieldValue) -> str:
    """Return a value as text for names and tables."""
    if isinstance(value, Path):
        return value.name
    return "+".join(value) if isinstance(value, tuple) else str(value)


def add_location(error: ValueError, values: Mapping[str, FieldValue]) -> ValueError:
    """Return ``error`` with the combination ``values`` in front of its message."""
    location = f"sweep.over {format_values(values)}"
    return (
        error.with_location(location) if isinstance(error, FieldError) else ValueError(f"{location}: {error}")
    )


def _find_field(key: object, plan: Plan, task: object) -> tuple[str, str]:
    """Return owner and name of the field ``key``: ``Recipe``, or the class of the task."""
    owners = {"Recipe": [field.name for field in fields(plan.recipe)]}
    if is_dataclass(task):
        owners[type(task).__name__] = [field.name for field in fields(task) if field.init]
    # Both spellings: "dropout", and "Recipe.dropout" where the task has a dropout, too.
    pairs = [(owner, name) for owner, names in owners.items() for name in names]
    matches = [pair for pair in pairs if key in (pair[1], ".".join(pair))]
    if not matches:
        check_choice("sweep.over field", key, [name for _, name in pairs])
    if len(matches) > 1:
        qualified = [".".join(pair) for pair in matches]
        refuse("sweep.over field", key, f"{' or '.join(qualified)}: both have it", repr(qualified[0]))
    return matches[0]


def _read_values(key: str, values: object) -> list[FieldValue]:
    field = f"sweep.over {key}"
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        refuse(field, values, "a list of values", repr([values]))
    items = [_to_plain(field, value) for value in values]
    if not items:
        refuse(field, items, "at least one value", "leave it out")
    texts = list(map(repr, items))
    repeated = next((item for item, text in zip(items, texts, strict=True) if texts.count(text) > 1), None)
    if len(set(texts)) < len(texts):
        refuse(field, repeated, "each value once", repr(list(dict.fromkeys(items))))
    return items


def _to_plain(field: str, value: object) -> FieldValue:
    """Return ``value`` with numpy's numbers as Python's, and lists of texts as tuples."""
    if value is None or isinstance(value, bool | int | str | Path):
        return value
    if isinstance(value, Integral | Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if not isinstance(value, Sequence) or not value or not all(isinstance(text, str) for text in value):
        refuse(field, value, VALUES, "one of these")
    return tuple(value)


def _build_combination(
    plan: Plan,
    task: Callable[[Context], object],
    targets: Mapping[str, tuple[str, str]],
    values: Mapping[str, FieldValue],
    name: str,
) -> Combination:
    for_recipe = {targets[key][1]: value for key, value in values.items() if targets[key][0] == "Recipe"}
    for_task = {targets[key][1]: value for key, value in values.items() if targets[key][0] != "Recipe"}
    try:
        if for_recipe:
            recipe = replace(plan.recipe, **for_recipe)  # type: ignore[arg-type]
            plan = replace(plan, recipe=recipe)
        if for_task:
            assert is_dataclass(task) and not isinstance(task, type)
            task = replace(task, **for_task)
    except ValueError as error:
        raise add_location(error, values) from error
    return Combination(name=name, values=values, plan=plan, task=task)


def _name_runs(name: str, grid: Sequence[Mapping[str, FieldValue]]) -> list[str]:
    """Return a folder name for each combination: ``name,learning_rate=0.0001``.

    Names depend on the combination alone, so that a sweep that is continued finds its runs. A hash stands for
    values that are too long, or that another combination spells alike.
    """
    names = [_make_printable(f"{name},{format_values(values)}") for values in grid]
    return [
        text
        if len(text) <= MAX_NAME_LENGTH and names.count(text) == 1
        else f"{name},{hashlib.sha256(repr(list(values.items())).encode()).hexdigest()[:HASH_LENGTH]}"
        for text, values in zip(names, grid, strict=True)
    ]


def _make_printable(text: str) -> str:
    return "".join(
        character if character.isprintable() and character not in "/\\" else "_" for character in text
    )
