"""The same training with another framework, for features that the plan's framework lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from shardscope.frameworks.registry import frameworks
from shardscope.planner.checks.case import predict_memory
from shardscope.planner.memory_needs import compute_loose_headroom, fits
from shardscope.planner.repairs.single_changes import OFFLOADS

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.finding import PlanChange
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe

CUTS = ("tp", "pp", "vpp", "cp", "ep")
"""Degrees that shard the model or its work, not only its training state."""


def find_in_other_framework(plan: Plan, is_wanted: Callable[[Plan], bool]) -> Plan | None:
    """Return the first plan of another framework that ``is_wanted``, with the same sharding of model and
    state; it fits if ``plan`` does. None if there is none."""
    return next((other for other in _list_same_sharding(plan) if is_wanted(other)), None)


def search_other_frameworks(plan: Plan, is_wanted: Callable[[Plan], bool]) -> PlanChange | None:
    """Return the search's best plan of the first other framework whose best plan ``is_wanted``; not a tight
    one if ``plan`` has room."""
    from shardscope.planner.repairs.combined_changes import (
        search_change,  # Not above: resuming a run needs no search.
    )

    memory = predict_memory(plan)
    has_room = memory is not None and fits(plan, memory) and not memory.is_tight
    kept_free = compute_loose_headroom(plan.cluster) if has_room else 0
    changes = (
        search_change(plan, frameworks=(name,), headroom_bytes=kept_free)
        for name in frameworks
        if name != plan.layout.framework
    )
    return next((change for change in changes if change and is_wanted(change.plan)), None)


def replace_parts(
    plan: Plan,
    *,
    architecture: Architecture | None = None,
    recipe: Recipe | None = None,
    layout: Layout | None = None,
) -> Plan | None:
    """Return ``plan`` with whole parts replaced; None if the plan is invalid, or no longer fits."""
    try:
        changed = replace(
            plan,
            architecture=architecture or plan.architecture,
            recipe=recipe or plan.recipe,
            layout=layout or plan.layout,
        )
    except ValueError:
        return None
    # A fix must not take away a fit, but a plan that does not fit anyway may still be fixed in other ways.
    before, after = predict_memory(plan), predict_memory(changed)
    had_room = before is not None and fits(plan, before)
    return None if had_room and (after is None or not fits(changed, after)) else changed


def _keep_master_weights(plan: Plan, other: Plan | None) -> Plan | None:
    """Return ``found`` with fp32 master weights if ``plan`` has them: not every framework keeps them in
    "bf16"."""
    # In "bf16", DeepSpeed and Megatron-core keep fp32 master weights, DDP and FSDP2 do not: moving a plan to
    # another framework must not drop them.
    if other is None or other.recipe.precision != "bf16" or not _keeps_fp32(plan) or _keeps_fp32(other):
        return other
    return replace_parts(other, recipe=replace(other.recipe, precision="bf16-mixed"))


def _keeps_fp32(plan: Plan) -> bool:
    return frameworks[plan.layout.framework].defaults().keeps_fp32_weights(plan)


def _list_same_sharding(plan: Plan) -> Iterator[Plan]:
    wanted = {name: getattr(plan.degrees, name) for name in CUTS}
    for framework in frameworks.values():
        known = framework.layout_class.__dataclass_fields__
        # A framework without, say, pipeline stages cannot have the same sharding.
        if isinstance(plan.layout, framework.layout_class) or any(
            number > 1 and name not in known for name, number in wanted.items()
        ):
            continue
        same = {name: number for name, number in wanted.items() if name in known}
        # On the GPU first. Offload only if that does not fit, because it makes each step slower.
        for moved in ({}, {name: "cpu" for name in OFFLOADS if name in known}):
            other = _keep_master_weights(
                plan, replace_parts(plan, layout=framework.layout_class(**same, **moved))
            )
            if other is not None and other.degrees.shard == plan.degrees.shard:
                yield other
