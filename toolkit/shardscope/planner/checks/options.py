"""Layout options that are set but not read by the framework."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.core.finding import Finding
from shardscope.frameworks.registry import frameworks
from shardscope.planner.checks.case import Case, changed_plan


def without_use(case: Case) -> Iterator[Finding]:
    """Report layout fields that differ from their defaults and have no effect."""
    plan = case.plan
    unused = frameworks[plan.layout.framework].habits().unused(plan)
    if not unused:
        return
    said = ", ".join(f"{name}={getattr(plan.layout, name)!r}" for name in unused)
    fields = plan.layout.__dataclass_fields__
    plain = {name: fields[name].default for name in unused}
    yield Finding(
        name="option-without-use",
        severity="hint",
        why=f"{said}: {plan.layout.title} reads {'it' if len(unused) == 1 else 'them'} only "
        f"{' and '.join(dict.fromkeys(unused.values()))}, and {len(unused)} of the layout's "
        f"option{'s' if len(unused) > 1 else ''} change{'s' if len(unused) == 1 else ''} nothing.",
        number=float(len(unused)),
        change=", ".join(f"{name}={value!r}" for name, value in plain.items()),
        plan=changed_plan(plan, layout=plain),
    )
