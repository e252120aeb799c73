"""What tells two plans apart, in words: for a pair that is shown side by side."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardscope.plan import Plan


def differences(before: Plan, after: Plan) -> list[str]:
    """``recompute none → full`` and the like, from ``before`` to ``after``; empty for equal plans.

    Another framework is one difference: its fields have no counterpart.
    """
    found = []
    if before.architecture != after.architecture:
        found.append(_change("model", before.architecture.name, after.architecture.name))
    if before.cluster != after.cluster:
        found.append(_change("GPUs", str(before.cluster), str(after.cluster)))
    found += _fields(before.recipe, after.recipe)
    if type(before.layout) is not type(after.layout):
        found.append(_change("framework", before.layout.description, after.layout.description))
    else:
        found += _fields(before.layout, after.layout)
    return found


def _fields(before: Any, after: Any) -> list[str]:
    pairs = (
        (field.name, getattr(before, field.name), getattr(after, field.name)) for field in fields(before)
    )
    return [_change(name.replace("_", " "), old, new) for name, old, new in pairs if old != new]


def _change(name: str, old: Any, new: Any) -> str:
    return f"{name} {_value(old)} → {_value(new)}"


def _value(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
