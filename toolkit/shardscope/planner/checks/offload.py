"""Training state in host memory or on NVMe, although it would fit on the GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardscope.core.cluster import name_device
from shardscope.core.finding import Finding
from shardscope.core.number_format import format_gib, join_list
from shardscope.frameworks.registry import frameworks
from shardscope.planner.checks.case import (
    NOTICEABLE,
    Case,
    Change,
    Variant,
    evaluate_variants,
    find_fastest,
    replace_plan_fields,
)
from shardscope.planner.checks.number_format import format_percent
from shardscope.planner.memory_needs import list_memory_needs, relies_on_unknown_memory
from shardscope.planner.repairs.single_changes import LAYOUT_TEXTS, OFFLOADS
from shardscope.timing.report import format_seconds

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

NEARER = {"nvme": (None, "cpu"), "cpu": (None,)}
"""Places that are nearer to the GPU's arithmetic than that of the key."""
PLACES = {"cpu": "in host memory", "nvme": "on NVMe"}


def check_unneeded_offload(case: Case) -> Iterator[Finding]:
    """Report training state that is offloaded although there is room nearer, if the step is shorter there."""
    plan = case.plan
    # CPU ranks' memory is the host's: nothing moves.
    if case.step is None or case.memory is None or not case.has_room or not plan.on_gpu:
        return
    # Not into a tight plan, which may run out of memory, and not into more host memory of unknown size.
    variants = [
        variant
        for variant in evaluate_variants(plan, _list_nearer_places(plan))
        if case.compute_gain(variant) >= NOTICEABLE
        and case.keeps_launch(variant.plan)
        and variant.memory.verdict == "fits"
        and not relies_on_unknown_memory(variant.plan, variant.memory, plan, case.memory)
    ]
    fixed = find_fastest(variants)
    if fixed is None:
        return
    before, after = _get_places(plan), _get_places(fixed.plan)
    moved = [name for name in before if after.get(name) != before[name]]
    states = join_list([OFFLOADS[name] for name in moved])
    verb = "are" if len(moved) > 1 or states == OFFLOADS["offload_params"] else "is"
    was = join_list([PLACES[place] for place in dict.fromkeys(before[name] for name in moved)])
    device = name_device(plan.cluster)
    peak, usable = format_gib(fixed.memory.peak_bytes), format_gib(fixed.memory.usable_bytes)
    # From NVMe to the host, or from either to the GPU.
    to_host = any(name in after for name in moved)
    texts = [LAYOUT_TEXTS[name, after.get(name)] for name in moved]
    changes = join_list([f"{text[:1].lower()}{text[1:]}" for text in texts])
    won = case.step.seconds - fixed.step.seconds
    yield Finding(
        name="state-offloaded-though-room",
        severity="warning",
        why=f"{states[:1].upper()}{states[1:]} {verb} {was}, though there is room "
        f"{PLACES['cpu'] if to_host else f'on the {device}'}: with the change the plan needs {peak} "
        f"of {usable} GiB per {device}{_describe_host_memory(fixed)}, and a step is {format_seconds(won)} "
        f"shorter ({format_percent(case.compute_gain(fixed))}).",
        number=won,
        change=f"{changes[:1].upper()}{changes[1:]}",
        plan=_reset_unused_options(plan, fixed.plan),
    )


def _reset_unused_options(before: Plan, after: Plan) -> Plan:
    """Return ``after`` without the options that only the offload of ``before`` uses, as NVMe's buffers."""
    defaults = frameworks[before.layout.framework].defaults()
    unused = defaults.find_unused_options(after).keys() - defaults.find_unused_options(before).keys()
    fields = after.layout.__dataclass_fields__
    return replace_plan_fields(after, layout={name: fields[name].default for name in unused}) or after


def _describe_host_memory(variant: Variant) -> str:
    """Return the host memory that the variant needs, as text; empty if it needs none."""
    needs = [one for one in list_memory_needs(variant.plan, variant.memory) if one.name == "host memory"]
    return "".join(
        f" and {format_gib(one.needed_bytes)} of {format_gib(one.room_bytes)} GiB of host memory per node"
        for one in needs
        if one.room_bytes is not None
    )


def _get_places(plan: Plan) -> dict[str, str]:
    """Return the place of each kind of state that is offloaded."""
    places = {name: getattr(plan.layout, name, None) for name in OFFLOADS}
    return {name: place for name, place in places.items() if place is not None}


def _list_nearer_places(plan: Plan) -> Iterator[Change]:
    """Yield every combination of nearer places, the fewest changes first."""
    places = _get_places(plan)
    values = [(place, *NEARER[place]) for place in places.values()]
    changes = [
        {name: value for name, value in zip(places, combination, strict=True) if value != places[name]}
        for combination in itertools.product(*values)
    ]
    for change in sorted(filter(None, changes), key=len):
        yield {}, change
