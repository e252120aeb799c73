"""What every check reads: the plan, what will be run of it, and its reports, each made at most once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.planner.capacity import fits

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import MemoryReport
    from shardscope.planner.repairs.repairs import Repair
    from shardscope.timing.report import Part, StepReport

NOTICEABLE = 0.02
"""A faster plan is worth a person's look from this share of the step on; less is within the model's error."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan under inspection."""

    plan: Plan
    task: object = None
    """What will be run: a ``Pretrain``, a function ``f(ctx)``; None: not known yet."""

    @cached_property
    def memory(self) -> MemoryReport | None:
        """The plan's predicted memory; None where there are no formulas for it."""
        return memory_of(self.plan)

    @cached_property
    def step(self) -> StepReport | None:
        """The plan's predicted step; None where a figure that it needs is not known."""
        return step_of(self.plan)

    @cached_property
    def has_room(self) -> bool | None:
        """Whether cards, hosts and NVMe have room, as far as known; None where there are no formulas."""
        return None if self.memory is None else fits(self.plan, self.memory)

    @cached_property
    def repairs(self) -> list[Repair]:
        """Single changes that make the plan fit, the cheapest first."""
        try:
            return self.plan.repairs()
        except ValueError:
            return []

    def share(self, part: Part) -> float:
        """The share of the step that goes to ``part``; 0 where the step is not known."""
        return 0.0 if self.step is None else self.step.parts[part] / self.step.seconds

    def gain(self, variant: Variant) -> float:
        """By what share of the step ``variant`` is faster for the same tokens; negative: slower."""
        if self.step is None:
            return 0.0
        return 1 - self.step.tokens_per_second / variant.step.tokens_per_second


def memory_of(plan: Plan) -> MemoryReport | None:
    """``plan.memory()``; None where there are no formulas for it."""
    try:
        return plan.memory()
    except ValueError:
        return None


def step_of(plan: Plan) -> StepReport | None:
    """``plan.step()``; None where a figure that it needs is not known."""
    try:
        return plan.step()
    except ValueError:
        return None


class Variant(NamedTuple):
    """A changed plan that can run and has room, with its reports."""

    plan: Plan
    memory: MemoryReport
    step: StepReport


Change = tuple[Mapping[str, Any], Mapping[str, Any]]
"""Fields of the recipe and fields of the layout, with their new values."""


def variants(plan: Plan, changes: Iterable[Change]) -> Iterator[Variant]:
    """Those of ``changes`` that can run, have room and have a time."""
    for recipe, layout in changes:
        changed = changed_plan(plan, recipe=recipe, layout=layout)
        if changed is None:
            continue
        memory, step = memory_of(changed), step_of(changed)
        if memory is not None and step is not None and fits(changed, memory):
            yield Variant(changed, memory, step)


def fastest(found: Iterable[Variant]) -> Variant | None:
    """The variant with most tokens a second; None of none."""
    return max(found, key=lambda variant: variant.step.tokens_per_second, default=None)


def changed_task(task: object, **fields: Any) -> object:
    """``task`` with other fields; None where it has none such, or refuses them."""
    if not is_dataclass(task) or isinstance(task, type):
        return None
    try:
        return replace(task, **fields)
    except (TypeError, ValueError):
        return None


def changed_plan(
    plan: Plan, *, recipe: Mapping[str, Any] | None = None, layout: Mapping[str, Any] | None = None
) -> Plan | None:
    """``plan`` with other fields, a derived number of shards derived anew; None where that is refused."""
    fields: dict[str, Any] = dict(layout or {})
    if fields and "shard" in plan.layout.__dataclass_fields__:
        fields = {"shard": None, **fields}
    try:
        return replace(
            plan,
            recipe=replace(plan.recipe, **(recipe or {})),
            layout=replace(plan.layout, **fields) if fields else plan.layout,
        )
    except ValueError:
        return None
