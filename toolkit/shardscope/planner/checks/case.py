"""Input of the checks: the plan, its task and its cached reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.fixes import without_fix_search
from shardscope.core.serialization import replace_fields
from shardscope.frameworks.registry import is_trained
from shardscope.planner.advice.descriptions import compare_seconds
from shardscope.planner.advice.plan_evaluator import SAFE
from shardscope.planner.checks.number_format import format_percent
from shardscope.planner.memory_needs import fits

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import MemoryReport
    from shardscope.planner.repairs.repairs import Repair
    from shardscope.timing.report import Part, StepReport

NOTICEABLE = 0.02
"""Share of the step from which a faster plan is worth reporting; smaller gains are within the model's
error."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan under inspection."""

    plan: Plan
    task: object = None
    """The task, such as a ``Finetune`` or a function ``f(ctx)``; None if it is not known yet."""

    @cached_property
    def memory(self) -> MemoryReport | None:
        """Return the plan's predicted memory; None if there are no formulas for it."""
        return predict_memory(self.plan)

    @cached_property
    def step(self) -> StepReport | None:
        """Return the plan's predicted step; None if a required figure is not known."""
        return predict_step(self.plan)

    @cached_property
    def has_room(self) -> bool | None:
        """Return whether GPU memory, host memory and NVMe suffice, as far as known; None if there are no
        formulas."""
        return None if self.memory is None else fits(self.plan, self.memory)

    @cached_property
    def repairs(self) -> list[Repair]:
        """Return the single changes that make the plan fit, the cheapest first."""
        try:
            return self.plan.repairs()
        except ValueError:
            return []

    def keeps_launch(self, other: Plan) -> bool:
        """Return whether ``other`` can be launched here, if the plan under inspection can be."""
        return is_trained(other) or not is_trained(self.plan)

    def get_share(self, part: Part) -> float:
        """Return the share of the step spent in ``part``; 0 if the step is not known."""
        return 0.0 if self.step is None else self.step.parts[part] / self.step.seconds

    def compute_gain(self, variant: Variant) -> float:
        """Return the share of the step by which ``variant`` is shorter for the same tokens; negative if
        longer."""
        if self.step is None:
            return 0.0
        return 1 - self.step.tokens_per_second / variant.step.tokens_per_second

    def find_best(self, candidates: Iterable[Variant]) -> Variant | None:
        """Return the fastest variant; a tight one only if it is over a third faster than the others, and than
        the plan itself if that has room."""
        variants = list(candidates)
        fastest = find_fastest(variants)
        if fastest is None or not fastest.memory.is_tight:
            return fastest
        loose = find_fastest(variant for variant in variants if not variant.memory.is_tight)
        enough = fastest.step.tokens_per_second / SAFE
        if loose is not None:
            return fastest if loose.step.tokens_per_second < enough else loose
        is_loose = self.memory is not None and bool(self.has_room) and not self.memory.is_tight
        is_much_faster = self.step is not None and self.step.tokens_per_second < enough
        return None if is_loose and not is_much_faster else fastest

    def describe_speedup(self, variant: Variant) -> str:
        """Return how much faster ``variant`` is for the same tokens, as text: ``34 % faster``, as advice
        does."""
        assert self.step is not None
        return compare_seconds(1 / variant.step.tokens_per_second, 1 / self.step.tokens_per_second)

    def describe_slowdown(self, plan: Plan | None) -> str:
        """Return how much longer the step of the fixed ``plan`` takes, as text: ``, 24 % slower``; empty if
        it is not noticeable or not known."""
        step = None if plan is None else predict_step(plan)
        if self.step is None or step is None:
            return ""
        lost = self.step.tokens_per_second / step.tokens_per_second - 1
        return f", {format_percent(lost)} slower" if lost >= NOTICEABLE else ""


def predict_memory(plan: Plan) -> MemoryReport | None:
    """Return ``plan.memory()``; None if there are no formulas for it."""
    try:
        return plan.memory()
    except ValueError:
        return None


def predict_step(plan: Plan) -> StepReport | None:
    """Return ``plan.step()``; None if a required figure is not known."""
    try:
        return plan.step()
    except ValueError:
        return None


class Variant(NamedTuple):
    """A changed plan that can run and fits, with its reports."""

    plan: Plan
    memory: MemoryReport
    step: StepReport


Change = tuple[Mapping[str, object], Mapping[str, object]]
"""New values of recipe fields and of layout fields."""


def evaluate_variants(plan: Plan, changes: Iterable[Change]) -> Iterator[Variant]:
    """Yield the variants for ``changes`` that can run, fit and have a predicted time."""
    for recipe, layout in changes:
        changed = replace_plan_fields(plan, recipe=recipe, layout=layout)
        # A change is no fix if it cannot run, does not fit, or has no predicted time to compare.
        if changed is None:
            continue
        memory, step = predict_memory(changed), predict_step(changed)
        if memory is not None and step is not None and fits(changed, memory):
            yield Variant(changed, memory, step)


def find_fastest(candidates: Iterable[Variant]) -> Variant | None:
    """Return the variant with the most tokens per second; None if there are no variants."""
    return max(candidates, key=lambda variant: variant.step.tokens_per_second, default=None)


def replace_task_fields(task: object, **fields: object) -> object:
    """Return ``task`` with other fields; None if it has no such fields or rejects the values."""
    # A function f(ctx) has no fields: its finding is shown without a fix.
    if not is_dataclass(task) or isinstance(task, type):
        return None
    try:
        return replace_fields(task, fields)
    except (TypeError, ValueError):
        return None


def replace_plan_fields(
    plan: Plan, *, recipe: Mapping[str, object] | None = None, layout: Mapping[str, object] | None = None
) -> Plan | None:
    """Return ``plan`` with other fields, deriving the number of shards again; None if the plan is invalid."""
    # A layout stores the number of shards that followed from its old degrees; None derives it from the new
    # ones.
    fields = dict(layout or {})
    if fields and "shard" in plan.layout.__dataclass_fields__:
        fields = {"shard": None, **fields}
    try:
        with without_fix_search():
            return replace(
                plan,
                recipe=replace_fields(plan.recipe, recipe or {}),
                layout=replace_fields(plan.layout, fields) if fields else plan.layout,
            )
    except ValueError:
        return None
