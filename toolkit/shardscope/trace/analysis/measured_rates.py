"""Speeds of matmuls and collectives that a trace measured, for the calibration of its machine."""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median
from typing import TYPE_CHECKING

from shardscope.timing.calibration.curves import COLLECTIVES, Collective
from shardscope.timing.calibration.selection import select_rates
from shardscope.timing.calibration.store import find_traced_rates
from shardscope.timing.calibration.traced import MAX_CALLS, MAX_FACTOR, TracedCall, TracedRates
from shardscope.timing.collectives import crosses_nodes
from shardscope.timing.layers import PEAKS
from shardscope.trace.analysis.collectives import CollectiveRow, find_collectives
from shardscope.trace.analysis.plan_comparison import compare_with_plan

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.trace.store import Trace

_COLLECTIVE_OF_KIND: dict[str, Collective] = {**{name: name for name in COLLECTIVES}, "send_recv": "send"}
MATRICES = "matrices"


def measure_rates(trace: Trace, plan: Plan) -> TracedRates:
    """Return the measured speeds; see :meth:`Trace.measured_rates`.

    Raises ``ValueError`` if the plan has no prediction to compare with, or the trace measured no speed.
    """
    # Refer to the rates below those of an earlier trace: the new ratios replace the old ones.
    known = find_traced_rates(plan.cluster)
    notes: list[str] = []
    speed = _measure_matmul_speed(trace, plan, notes)
    if speed is not None and known is not None and known.matmul_speed is not None:
        speed *= known.matmul_speed
    calls = _list_calls(trace, plan, notes)
    if speed is None and not calls:
        raise ValueError(
            f"This trace measured no speed that a plan uses. {' '.join(notes)} "
            "Fix: record a step of training with run.profile(shapes=True)."
        )
    return TracedRates(
        gpu=plan.cluster.gpu.name,
        base=known.base if known is not None else select_rates(plan.cluster).source,
        precision=PEAKS[plan.recipe.precision],
        matmul_speed=None if speed is None else min(max(speed, 1 / MAX_FACTOR), MAX_FACTOR),
        calls=tuple(calls),
        notes=tuple(notes),
    )


def _measure_matmul_speed(trace: Trace, plan: Plan, notes: list[str]) -> float | None:
    """Return the measured over the predicted speed of the plan's matmuls, from their seconds."""
    # The plan has recomputed matmuls apart; the recording does not distinguish them from those of forward.
    if plan.recipe.recompute != "none":
        notes.append("Recomputed matmuls are recorded like those of forward, so their rate is not changed.")
        return None
    # Otherwise a predicted step would be compared with a recording of an unknown number of them.
    if not trace.activity.has_steps:
        notes.append("No steps are marked in the trace, so the rate of matmuls is not changed.")
        return None
    for row in compare_with_plan(trace, plan):
        if row["part"] == MATRICES and row["predicted_seconds"] and row["measured_seconds"]:
            return row["predicted_seconds"] / row["measured_seconds"]
    notes.append("No matmul was recorded, so their rate is not changed.")
    return None


def _list_calls(trace: Trace, plan: Plan, notes: list[str]) -> list[TracedCall]:
    """Return the collectives of groups within a node, by axis, kind, group and size."""
    groups: dict[tuple[str, Collective, int, int], dict[int, float]] = defaultdict(dict)
    num_unknown = num_across = num_partial = 0
    collectives = find_collectives(trace, plan)
    recorded = Counter(row["call"] for row in collectives)
    # Each rank reads its vector at least once. gloo's annotations can end before the transfer does.
    fastest = select_rates(plan.cluster).memory_bytes_per_second or float("inf")
    for row in collectives:
        collective = _COLLECTIVE_OF_KIND.get(row["kind"])
        if collective is None:
            continue
        ranks, transfer = _find_group_size(row), row["transfer_seconds"]
        size = row["num_bytes"]
        if ranks is None or not transfer or not size or size / transfer > fastest:
            num_unknown += 1
        elif recorded[row["call"]] < ranks:
            num_partial += 1  # the last rank to arrive may be another one: all of these may have waited
        elif not _is_within_node(row["axis"], ranks, plan):
            num_across += 1
        else:
            # Once for each call, which has a row on every rank.
            groups[row["axis"], collective, ranks, size][row["call"]] = transfer
    if num_across:
        notes.append(f"{num_across:,} collectives cross nodes, whose link keeps its rate.")
    if num_partial:
        notes.append(f"{num_partial:,} collectives of which not all ranks were recorded are left out.")
    if num_unknown:
        notes.append(
            f"{num_unknown:,} collectives without known bytes or ranks, or with an impossible time, are left "
            "out."
        )
    calls = [
        TracedCall(
            axis=axis,
            collective=collective,
            num_bytes=num_bytes,
            num_ranks=ranks,
            num_calls=len(seconds),
            seconds=median(seconds.values()),
        )
        for (axis, collective, ranks, num_bytes), seconds in groups.items()
    ]
    # Keep the largest sizes, which take most of the time.
    return sorted(calls, key=lambda call: -call.num_bytes)[:MAX_CALLS]


def _find_group_size(row: CollectiveRow) -> int | None:
    """Return the ranks of a call's group from the ratio of its bandwidths; 2 for a message."""
    if row["kind"] == "send_recv":
        return 2
    if not row["bus_bandwidth"] or not row["algorithm_bandwidth"]:
        return None
    share = row["bus_bandwidth"] / row["algorithm_bandwidth"] / (2 if row["kind"] == "all_reduce" else 1)
    # The share is (n - 1) / n: collectives.find_bus_factor.
    return round(1 / (1 - share)) if share < 1 else None


def _is_within_node(axis: str, ranks: int, plan: Plan) -> bool:
    """Return whether a group of this axis is on one node, by the order of the mesh's axes."""
    if plan.cluster.num_nodes == 1:
        return True
    # Innermost first, as all four engines order ranks: Megatron's tp-cp-ep-dp-pp, torchtitan's mesh and
    # DeepSpeed's topology.
    degrees = plan.degrees
    strides = {"tp": 1, "cp": degrees.tp, "ep": degrees.tp * degrees.cp}
    stride = strides.get(axis.split("+")[0])
    if stride is None:
        return False
    return not crosses_nodes(ranks * stride, plan.cluster.gpus_per_node)
