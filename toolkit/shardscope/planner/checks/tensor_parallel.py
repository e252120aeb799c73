"""Checks of tensor parallelism over a slow link."""

from __future__ import annotations

from collections.abc import Iterator
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
    find_fastest,
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
        for variant in evaluate_variants(plan, _list_changes(case))
        if case.compute_gain(variant) > NOTICEABLE
    )
    fixed = find_fastest(faster)
    # Inside a node the plan may still be the fastest one that fits, so without a faster variant there is no
    # finding.
    if fixed is None and not crosses:
        return
    link = cluster.inter_node_link if crosses else cluster.intra_node_link
    where = f"across nodes over {link.name}" if crosses else f"over {link.name}"
    gain = (
        ""
        if fixed is None
        else f", and {_format_degrees(fixed.plan)} is {format_percent(case.compute_gain(fixed))} faster"
    )
    yield Finding(
        name="tensor-parallel-over-slow-link",
        severity="danger" if share > 0.5 else "warning",
        why=f"{tp} tensor-parallel ranks exchange activations {where} "
        f"({format_bandwidth(link.bandwidth_bytes_per_second)} per GPU): waiting for it takes "
        f"{format_percent(share)} of the step{gain}.",
        number=100 * share,
        change=f"{_format_degrees(fixed.plan)} instead of {_format_degrees(plan)}"
        if fixed
        else f"At most tp={_find_widest_inside(plan)}, which keeps each group on a node of "
        f"{format_count(cluster.gpus_per_node, 'GPU')}",
        plan=fixed.plan if fixed else None,
        search=None if fixed else partial(_inside_nodes, plan),
    )


def _find_widest_inside(plan: Plan) -> int:
    """Return the largest tp below the plan's whose groups are each on one node."""
    per_node = plan.cluster.gpus_per_node
    return max(tp for tp in list_divisors(per_node) if tp <= plan.degrees.tp)


def _inside_nodes(plan: Plan) -> PlanChange | None:
    """Return the best of all plans if its tensor-parallel ranks are in one node; otherwise ``plan`` with tp
    limited to a node's GPUs, whether or not it fits."""
    most = _find_widest_inside(plan)
    # The whole search first, because its plan fits. tp limited to a node may not, but is the right direction.
    change = search_change(plan)
    if change and not crosses_nodes(change.plan.degrees.tp, plan.cluster.gpus_per_node):
        return change
    smaller = replace_plan_fields(plan, layout={"tp": most})
    return None if smaller is None else PlanChange((f"tp={most}",), smaller)


def _list_changes(case: Case) -> Iterator[Change]:
    """Yield smaller tp degrees, with the remaining factor moved to data parallelism or to pipeline stages."""
    layout, tp, pp = case.plan.layout, case.plan.degrees.tp, case.plan.degrees.pp
    for smaller in list_divisors(tp)[:-1]:
        changed: dict[str, object] = {"tp": smaller}
        # Megatron-core rejects sequence parallelism without tensor parallelism; None lets it follow tp.
        if getattr(layout, "sequence_parallel", None) and smaller == 1:
            changed["sequence_parallel"] = None
        yield {}, changed
        # The freed factor of ranks goes to data parallelism above, which needs more memory, or to pipeline
        # stages here.
        if "pp" in layout.choices:
            yield {}, {**changed, "pp": pp * tp // smaller}


def _format_degrees(plan: Plan) -> str:
    degrees = plan.degrees
    return f"tp={degrees.tp}" + (f", pp={degrees.pp}" if degrees.pp > 1 else "")
