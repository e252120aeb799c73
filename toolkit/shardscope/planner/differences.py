"""What tells two plans apart, in words: for a pair that is shown side by side."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan


class Difference(NamedTuple):
    """One field in which two plans differ."""

    field: str
    """As recipe and layout spell it; or ``model``, ``GPUs``, ``framework``."""
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.field.replace('_', ' ')} {_value(self.before)} → {_value(self.after)}"


def differences(before: Plan, after: Plan) -> list[Difference]:
    """``recompute none → full`` and the like, from ``before`` to ``after``; empty for equal plans.

    Another framework is one difference: its fields have no counterpart. What follows from the rest of a plan
    where it is left open is none.
    """
    found = []
    if before.architecture != after.architecture:
        found.append(Difference("model", before.architecture.name, after.architecture.name))
    if before.cluster != after.cluster:
        found.append(Difference("GPUs", str(before.cluster), str(after.cluster)))
    found += _fields(before.recipe, after.recipe)
    if type(before.layout) is not type(after.layout):
        found.append(Difference("framework", before.layout.description, after.layout.description))
    else:
        found += _fields(_chosen(before, after), _chosen(after, before))
    return found


def does_the_same(one: Plan, other: Plan) -> bool:
    """Return whether two plans do the same, however their defaults are written."""
    return (
        (one.architecture, one.cluster) == (other.architecture, other.cluster)
        and one.layout.framework == other.layout.framework
        and one.degrees == other.degrees
        and one.recipe.micro_batch_size == other.recipe.micro_batch_size
        and one.recipe.recompute == other.recipe.recompute
        and one.memory().peak_bytes == other.memory().peak_bytes
    )


def _chosen(plan: Plan, other: Plan) -> Layout:
    """The layout of ``plan`` but for numbers that ``other`` leaves open and that follow here."""
    chosen = plan.layout
    names = [field.name for field in fields(chosen) if field.name not in chosen.choices]
    open_there = [name for name in names if getattr(other.layout, name) is None]
    # One number may follow only once another is left open as well.
    for name in open_there * 2:
        left_open = replace(chosen, **{name: None})
        if left_open.settled(plan.architecture, plan.cluster, plan.recipe) == plan.layout:
            chosen = left_open
    return chosen


def _fields(before: Any, after: Any) -> list[Difference]:
    pairs = (
        Difference(field.name, getattr(before, field.name), getattr(after, field.name))
        for field in fields(before)
    )
    return [pair for pair in pairs if pair.before != pair.after]


def _value(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
