"""What tells two plans apart, in words: for a pair that is shown side by side."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from shardscope.layout import Layout
    from shardscope.plan import Plan


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
        found += _fields(_as_chosen(before), _as_chosen(after))
    return found


def _as_chosen(plan: Plan) -> Layout:
    """The layout without the numbers that follow from the rest of the plan where they are left open."""
    chosen = plan.layout
    for field in fields(chosen):
        if field.default is None and getattr(chosen, field.name) is not None:
            left_open = replace(chosen, **{field.name: None})
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
