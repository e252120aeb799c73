"""Differences between two plans that are compared side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, NamedTuple

from shardscope.frameworks.registry import frameworks

if TYPE_CHECKING:
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe


class Difference(NamedTuple):
    """One field with different values in two plans."""

    field: str
    """Field name of the recipe or layout; or ``model``, ``GPUs``, ``framework``."""
    before: object
    after: object

    def __str__(self) -> str:
        name, before, after = self.field.replace("_", " "), self.before, self.after
        if before is None:
            return f"{name} set to {_format_value(after)}"
        if after is None:
            return f"{name} no longer set (it was {_format_value(before)})"
        return f"{name} {_format_value(before)} → {_format_value(after)}"


def find_differences(before: Plan, after: Plan) -> list[Difference]:
    """Return the differences from ``before`` to ``after``, such as ``recompute none → full``; empty for equal
    plans.

    Another framework is one difference, because its fields have no counterpart. A value that a plan leaves
    open and that is derived from the rest is no difference.
    """
    changes = []
    # Architecture and cluster are one difference each: their fields describe one thing that the user chose.
    if before.architecture != after.architecture:
        changes.append(Difference("model", before.architecture.name, after.architecture.name))
    if before.cluster != after.cluster:
        changes.append(Difference("GPUs", str(before.cluster), str(after.cluster)))
    changes += _compare_fields(before.recipe, after.recipe)
    if type(before.layout) is not type(after.layout):
        changes.append(Difference("framework", before.layout.description, after.layout.description))
    else:
        changes += _compare_fields(_drop_derived(before, after), _drop_derived(after, before))
    return changes


def does_the_same(one: Plan, other: Plan) -> bool:
    """Return whether two plans run the same training step, whether or not default values are written out."""
    # Equal peaks stand for all other options, except those that change the time alone: an option that is
    # written out and one that is derived give the same bytes.
    return (
        (one.architecture, one.cluster) == (other.architecture, other.cluster)
        and one.layout.framework == other.layout.framework
        and one.degrees == other.degrees
        and one.recipe.micro_batch_size == other.recipe.micro_batch_size
        and one.recipe.recompute == other.recipe.recompute
        and one.memory().peak_bytes == other.memory().peak_bytes
        and _find_waits(one) == _find_waits(other)
    )


def _find_waits(plan: Plan) -> Mapping[str, object]:
    """Return the options that would overlap collectives with computation and are off."""
    return frameworks[plan.layout.framework].defaults().find_overlap_options(plan)


def _drop_derived(plan: Plan, other: Plan) -> Layout:
    """Return the layout of ``plan`` without numbers that ``other`` leaves open and that are derived here
    too."""
    chosen = plan.layout
    names = [field.name for field in fields(chosen) if field.name not in chosen.choices]
    open_there = [name for name in names if getattr(other.layout, name) is None]
    # Twice, because one number may be derivable only after another is left open.
    for name in open_there * 2:
        left_open = replace(chosen, **{name: None})
        if left_open.resolve_options(plan.architecture, plan.cluster, plan.recipe) == plan.layout:
            chosen = left_open
    return chosen


def _compare_fields(before: Recipe | Layout, after: Recipe | Layout) -> list[Difference]:
    pairs = (
        Difference(field.name, getattr(before, field.name), getattr(after, field.name))
        for field in fields(before)
    )
    return [pair for pair in pairs if pair.before != pair.after]


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
