"""Which other framework trains what one refuses. Imports no torch."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardscope.frameworks.registry import frameworks

if TYPE_CHECKING:
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan

_DEGREES = ("tp", "pp", "vpp", "cp", "ep")


def others_that_train(plan: Plan) -> list[Layout]:
    """The plainest layouts of other frameworks with the same degrees that train this model and recipe here.

    Whether they have room is for their own prediction to say.
    """
    degrees = {name: getattr(plan.layout, name) for name in _DEGREES if getattr(plan.layout, name, 1) > 1}
    found = []
    for name, framework in frameworks.items():
        has = {field.name for field in fields(framework.layout_class)}
        if name == plan.layout.framework or not degrees.keys() <= has:
            continue
        limits: Any = import_module(f"shardscope.frameworks.{name}.limits")
        try:
            other = replace(plan, layout=framework.layout_class(**degrees))
            limits.check_plan(other)
        except ValueError:
            continue
        found.append(other.layout)
    return found


def fix_with_others(fix: str, plan: Plan) -> str:
    """``fix``, and after it the frameworks that train ``plan`` as it is and are not named there."""
    named = fix.lower()
    titles = [layout.title for layout in others_that_train(plan) if layout.framework not in named]
    if not titles:
        return fix
    listed = " or ".join([", ".join(titles[:-1]), titles[-1]] if len(titles) > 1 else titles)
    return f"{fix}, or {listed}, which {'trains' if len(titles) == 1 else 'train'} it"
