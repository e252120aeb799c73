"""Sequences of changes that make a plan fit if no single change is sufficient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, get_args

from shardscope.catalog import models
from shardscope.core.cluster import MAX_NODES
from shardscope.core.finding import PlanChange
from shardscope.core.recipe import Method
from shardscope.core.serialization import replace_fields
from shardscope.frameworks.registry import frameworks as known_frameworks
from shardscope.frameworks.registry import is_trained
from shardscope.planner.advice.descriptions import name_plan
from shardscope.planner.advice.plan_evaluator import SAFE
from shardscope.planner.differences import find_differences
from shardscope.planner.memory_needs import fits
from shardscope.planner.repairs.repairs import MAX_TIMES_SLOWER, find_steps, predict_seconds
from shardscope.planner.search.search import search
from shardscope.planner.verdict import State, assess_plan

if TYPE_CHECKING:
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan

METHODS = get_args(Method)
NEAR = 1.05
"""Ratio of step times within which plans count as equally cheap and the one with the fewest changes is
chosen: the median error of a predicted step is 6 %."""
MOST_CHANGES = 4
"""Largest number of consecutive changes; beyond that, a search is better."""
KEPT = 2
"""Plans of each round that the next round starts from: those that need least."""
MOST_TIMES_THE_NODES = 64
_BEST_FIRST: tuple[State, ...] = ("fits", "tight", "unknown", "does not fit")


def combine_changes(plan: Plan) -> PlanChange | None:
    """Return the nearest plan that fits, for a plan without a sufficient single change; None if none was
    found.

    First the fewest changes of ``plan.repairs()``, the fastest of equally few, then the best plan of a search
    over all frameworks. Only then adapters instead of full training, more nodes, and last a smaller model of
    the catalogue.
    """
    # In order of how much of the user's choice stays: the same method by steps, another layout by search,
    # adapters.
    change, last_candidates = _combine_step_by_step(plan, [plan.recipe.method])
    change = change or search_change(plan) or _combine_step_by_step(plan, METHODS)[0]
    if change is None:
        # Start from the plans that need least so far, and from other frameworks' defaults: what no number of
        # nodes shrinks, such as one layer's activations, another framework may shard.
        candidates = [*last_candidates, *list_other_frameworks(plan)]
        change = find_on_more_nodes(candidates, _has_room) or find_smaller_model(candidates, _has_room)
    return None if change is None else describe_change(plan, _restore_superfluous(plan, change.plan))


def _restore_superfluous(plan: Plan, fitting: Plan) -> Plan:
    """Return ``fitting`` without the changes of recipe and layout that it fits as well and as fast without.

    A later change, such as more nodes, may be sufficient without earlier ones.
    """
    for difference in find_differences(plan, fitting):
        if difference.field in ("model", "GPUs", "framework"):
            continue
        field = {difference.field: difference.before}
        is_recipe = difference.field in fitting.recipe.__dataclass_fields__
        layout = fitting.layout
        try:
            restored = replace(
                fitting,
                recipe=replace_fields(fitting.recipe, field) if is_recipe else fitting.recipe,
                layout=layout if is_recipe else replace_fields(layout, {**_reset_derived(layout), **field}),
            )
            is_as_good = _rank_state(restored) <= _rank_state(fitting)
        except ValueError:  # It needs another change, or there are no formulas for it.
            continue
        # "not ... >" accepts plans whose time is NaN (not known).
        if is_as_good and not predict_seconds(restored) > NEAR * predict_seconds(fitting):
            fitting = restored
    return fitting


def _rank_state(plan: Plan) -> int:
    return _BEST_FIRST.index(assess_plan(plan).state)


def describe_change(before: Plan, after: Plan) -> PlanChange:
    """Return the differences between two plans as one change, without steps that a later one undid."""
    changes = [
        f"{name_plan(after, after.recipe)} instead of {name_plan(before, before.recipe)}"
        if one.field == "framework"
        else str(one)
        for one in find_differences(before, after)
    ]
    return PlanChange(tuple(changes), after)


def _combine_step_by_step(plan: Plan, methods: Sequence[str]) -> tuple[PlanChange | None, list[PlanChange]]:
    """Return the best candidate of the first round with a sufficient one, and the last round's candidates.

    The first is None if no round has a sufficient candidate.
    """
    # A beam search: each round extends the leanest plans by one more change.
    candidates = [PlanChange((), plan)]
    most = (MAX_TIMES_SLOWER - 1) * predict_seconds(plan)
    for _ in range(MOST_CHANGES):
        extended = [
            longer
            for candidate in candidates
            for longer in _list_next_changes(candidate)
            if longer.plan.recipe.method in methods
        ]
        # "not ... >" keeps plans whose time is NaN (not known).
        sufficient = [
            candidate
            for candidate in extended
            if _has_room(candidate.plan) and not candidate.seconds_lost > most
        ]
        if sufficient:
            return min(sufficient, key=partial(_cheapest_first, plan)), candidates
        if not extended:
            break
        # A plan that fits but is too slow leads nowhere: extend those that do not fit yet.
        extended = [one for one in extended if not _has_room(one.plan)] or extended
        candidates = sorted(
            _drop_duplicates(extended), key=lambda candidate: candidate.plan.memory().peak_bytes
        )[:KEPT]
    return None, candidates


def _list_next_changes(candidate: PlanChange) -> Iterator[PlanChange]:
    for repair in find_steps(candidate.plan):
        yield PlanChange(
            (*candidate.changes, repair.change), repair.plan, candidate.seconds_lost + repair.seconds_lost
        )


def _drop_duplicates(candidates: list[PlanChange]) -> list[PlanChange]:
    """Return the candidates without duplicates that lead to the same plan in another order."""
    distinct: list[PlanChange] = []
    for candidate in candidates:
        if all(candidate.plan != other.plan for other in distinct):
            distinct.append(candidate)
    return distinct


def _cheapest_first(plan: Plan, candidate: PlanChange) -> tuple[bool, bool, bool, float]:
    """Return a sort key by time, that of tight plans a third longer.

    Plans that cannot be launched come last, if ``plan`` can be, and lower precision, because the preflight
    warns about it too.
    """
    changed = candidate.plan
    is_narrower = changed.recipe.precision != plan.recipe.precision
    loses_launch = is_trained(plan) and not is_trained(changed)
    seconds = predict_seconds(changed) * (SAFE if changed.memory().is_tight else 1.0)
    return is_narrower, loses_launch, math.isnan(seconds), seconds


def _has_room(plan: Plan) -> bool:
    return fits(plan, plan.memory())


def search_change(
    plan: Plan, *, frameworks: Sequence[str] | None = None, headroom_bytes: int = 0
) -> PlanChange | None:
    """Return the best plan of a search over the same GPUs with ``headroom_bytes`` free on each GPU; None if
    nothing fits, or a required figure is not known."""
    # The search uses the framework's defaults for options outside its grid, the user's plan may not.
    nouns = plan.architecture, plan.cluster, plan.recipe
    try:
        best = search(*nouns, frameworks, headroom_bytes=headroom_bytes).best
    except ValueError:
        return None
    changed = keep_options(plan, best)
    free = changed.cluster.usable_bytes_per_gpu - changed.memory().peak_bytes
    return describe_change(plan, changed if _has_room(changed) and free >= headroom_bytes else best)


def keep_options(plan: Plan, search_plan: Plan) -> Plan:
    """Return ``search_plan`` with ``plan``'s options, where a search leaves the framework's defaults."""
    # Another framework has no such fields.
    if type(search_plan.layout) is not type(plan.layout):
        return search_plan
    options = {
        field.name: getattr(plan.layout, field.name)
        for field in fields(search_plan.layout)
        if field.name not in search_plan.layout.choices
        and getattr(search_plan.layout, field.name) == field.default
    }
    try:
        changed = replace(
            search_plan,
            layout=replace(search_plan.layout, **{**options, **_reset_derived(search_plan.layout)}),
        )
        changed.memory()
    except ValueError:
        return search_plan
    return changed


def _reset_derived(layout: Layout) -> dict[str, None]:
    return {"shard": None} if "shard" in layout.__dataclass_fields__ else {}


def find_on_more_nodes(
    candidates: Sequence[PlanChange], is_enough: Callable[[Plan], bool]
) -> PlanChange | None:
    """Return a candidate on the fewest nodes, doubled each time, with at most one more change.

    None if nothing is sufficient on up to :data:`MOST_TIMES_THE_NODES` times as many, or for CPU ranks.
    """
    if candidates[0].plan.cluster.gpu.memory_is_shared:  # CPU ranks run on this one machine.
        return None
    # Doubling keeps every degree a divisor, and finds the fewest nodes within a factor of two.
    for power in range(1, MOST_TIMES_THE_NODES.bit_length()):
        moved = [_move_to_more_nodes(candidate, 2**power) for candidate in candidates]
        larger = [candidate for candidate in moved if candidate is not None]
        extended = [longer for candidate in larger for longer in _list_next_changes(candidate)]
        for candidate in (*larger, *extended):
            if is_enough(candidate.plan):
                return candidate
    return None


def find_smaller_model(
    candidates: Sequence[PlanChange], is_enough: Callable[[Plan], bool]
) -> PlanChange | None:
    """Return a candidate with the largest smaller model of the catalogue that is sufficient, the same family
    first; None if there is none."""
    original = candidates[0].plan.architecture
    smaller = [
        model for model in map(models.__getitem__, models) if model.num_parameters < original.num_parameters
    ]
    # The same family first: its models are the most similar ones.
    for model in sorted(
        smaller, key=lambda one: (one.model_type != original.model_type, -one.num_parameters)
    ):
        for candidate in candidates:
            try:
                plan = replace(candidate.plan, architecture=model)
                fits_here = is_enough(plan)
            except ValueError:
                continue
            if fits_here:
                return PlanChange((f"A smaller model: {model.name}", *candidate.changes), plan)
    return None


def list_other_frameworks(plan: Plan) -> Iterator[PlanChange]:
    """Yield the default layout of every framework that can run the plan: some need less memory that does not
    shrink."""
    for framework in known_frameworks.values():
        try:
            other = replace(plan, layout=framework.layout_class())
            other.memory()
        except ValueError:
            continue
        yield PlanChange((other.layout.description,), other)


def _move_to_more_nodes(candidate: PlanChange, times: int) -> PlanChange | None:
    """Return the candidate on ``times`` as many nodes; the global batch grows if it would be too small.

    None if that is invalid.
    """
    plan = candidate.plan
    num_nodes = plan.cluster.num_nodes * times
    if num_nodes > MAX_NODES:
        return None
    cluster = replace(plan.cluster, num_nodes=num_nodes)
    # More ranks mean more shards; the number that the layout has was derived from the old ones.
    layout = replace(plan.layout, **_reset_derived(plan.layout))
    # Keep the batch where it still gives every rank a micro-batch; otherwise let it grow with the nodes.
    for batch in (plan.recipe.global_batch_size, plan.recipe.global_batch_size * times):
        recipe = replace(plan.recipe, global_batch_size=batch)
        try:
            larger = replace(plan, cluster=cluster, recipe=recipe, layout=layout)
            larger.memory()
        except ValueError:
            continue
        changes = [f"{cluster.num_nodes} nodes of {cluster.gpus_per_node} GPUs"]
        changes += [f"Global batch {batch:,}"] * (batch != plan.recipe.global_batch_size)
        return PlanChange((*changes, *candidate.changes), larger)
    return None
