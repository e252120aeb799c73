"""Checks of tensor parallelism over a slow link."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from shardscope.core.finding import Finding, PlanChange
from shardscope.core.layout import list_divisors
from shardscope.core.number_format import format_count
from shardscope.planner.checks.case import (
    NOTICEABLE,
    Case,
    Change,
    evaluate_variants,
    replace_plan_fields,
)
from shardscope.planner.checks.number_format import format_bandwidth, format_percent
from shardscope.planner.repairs.combined_changes import search_change
from shardscope.timing.collectives import crosses_nodes

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

WAITS = 0.2
"""Share of a step from which waiting for tensor-parallel collectives is reported (an assumption): every such
layout waits for some time."""


def check_tensor_parallel_link(case: Case) -> Iterator[Finding]:
    """Report activation all-reduces that wait for a link between nodes, or inside a node without NVLink."""
    plan = case.plan
    tp, cluster = plan.degrees.tp, plan.cluster
    share = case.get_share("tensor_parallel")
    crosses = crosses_nodes(tp, cluster.gpus_per_node)
    # Inside a node some waiting is the price of tensor parallelism; across nodes it is reported in any case.
    if tp == 1 or case.step is None or (share < WAITS and not crosses):
        return
    faster = (
        variant
        for variant in evaluate_variants(plan, _list_changes(plan, list_divisors(tp)[:-1]))
        if case.compute_gain(variant) > NOTICEABLE
    )
    fixed = case.find_best(faster)
    # Inside a node the plan may still be the fastest one that fits, so without a faster variant there is no
    # finding.
    if fixed is None and not crosses:
        return
    widest = None if fixed else _find_widest_inside(plan)
    link = cluster.inter_node_link if crosses else cluster.intra_node_link
    where = f"across nodes over {link.name}" if crosses else f"over {link.name}"
    gain = "" if fixed is None else f", and {_format_degrees(fixed.plan)} is {case.describe_speedup(fixed)}"
    yield Finding(
        name="tensor-parallel-over-slow-link",
        severity="danger" if share > 0.5 else "warning",
        why=f"{tp} tensor-parallel ranks exchange activations {where} "
        f"({format_bandwidth(link.bandwidth_bytes_per_second)} per GPU): waiting for it takes "
        f"{format_percent(share)} of the step{gain}.",
        number=100 * share,
        change=f"{_format_degrees(fixed.plan)} instead of {_format_degrees(plan)}"
        if fixed
        else _describe_widest(plan, widest),
        plan=fixed.plan if fixed else None,
        search=None if fixed else partial(_inside_nodes, plan, widest),
    )


def _find_widest_inside(plan: Plan) -> Plan | None:
    """Return the valid plan with the largest tp below the plan's whose groups are each on one node, whether
    or not it fits; None if there is none."""
    inside = [tp for tp in list_divisors(plan.cluster.gpus_per_node) if tp < plan.degrees.tp]
    changed = (replace_plan_fields(plan, layout=one) for _, one in _list_changes(plan, reversed(inside)))
    return next((one for one in changed if one is not None), None)


def _describe_widest(plan: Plan, widest: Plan | None) -> str:
    gpus = format_count(plan.cluster.gpus_per_node, "GPU")
    if widest is None:
        return f"A tp that keeps each group on a node of {gpus}; it needs other degrees or another batch size"
    degrees = f"tp={widest.degrees.tp}"
    if widest.degrees.pp != plan.degrees.pp:
        degrees += f" with pp={widest.degrees.pp}"
    return f"At most {degrees}, which keeps each group on a node of {gpus}"


def _inside_nodes(plan: Plan, widest: Plan | None) -> PlanChange | None:
    """Return the best of all plans if its tensor-parallel ranks are in one node; otherwise ``widest``."""
    # The whole search first, because its plan fits. tp limited to a node may not, but is the right direction.
    change = search_change(plan)
    if change and not crosses_nodes(change.plan.degrees.tp, plan.cluster.gpus_per_node):
        return change
    return None if widest is None else PlanChange((_format_degrees(widest),), widest)


def _list_changes(plan: Plan, degrees: Iterable[int]) -> Iterator[Change]:
    """Yield changes to these tp degrees, with the freed ranks moved to data parallelism or to pipeline
    stages."""
    layout, tp, pp = plan.layout, plan.degrees.tp, plan.degrees.pp
    for smaller in degrees:
        changed: dict[str, object] = {"tp": smaller}
        # Megatron-core rejects sequence parallelism without tensor parallelism; None lets it follow tp.
        if getattr(layout, "sequence_parallel", None) and smaller == 1:
            changed["sequence_parallel"] = None
        yield {}, changed
        # The freed factor of ranks goes to data parallelism above, which needs more memory, or to pipeline
        # stages here.
        if "pp" in layout.choices and tp % smaller == 0:
            yield {}, {**changed, "pp": pp * tp // smaller}


def _format_degrees(plan: Plan) -> str:
    degrees = plan.degrees
    return f"tp={degrees.tp}" + (f", pp={degrees.pp}" if degrees.pp > 1 else "")
