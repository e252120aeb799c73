"""The rule by which the band's top was chosen: what published runs held beyond tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from tests.accuracy.measurement_kinds import find_kind, on_ranks, tensor_bytes
from tests.accuracy.own_code import with_communication
from tests.accuracy.rows import read_source
from tests.accuracy.scoring import Scored, predict_row

from shardscope.memory.overheads import libraries as overheads
from shardscope.memory.overheads.band import compute_allocated_and_freed

SHARE = 0.9
"""Of the rows, each source counting alike: the figure of :func:`chosen_share`."""


def held_share(row: Scored) -> float:
    """Return the row's memory beyond tensors as a share of the bytes that its step allocates and frees.

    The least share with which the band's top reaches the measured figure, with what ran beside the plan
    described. Of nvidia-smi's figures contexts and communicators are taken off first, at their most, as the
    band's top has them. Negative where these alone are more than was measured.
    """
    plan = row.mapped.plan
    stages = on_ranks(row.mapped.row, predict_row(row.mapped)[0])
    gpu = plan.cluster.gpu
    beside = 0
    if find_kind(row.mapped.row) == "nvidia-smi":
        beside = overheads.estimate_runtime(gpu.vendor, gpu.architecture).high
        beside += max(buffers.high for _, buffers in with_communication(plan, stages))
    return min(
        (row.measured - beside - tensor_bytes(moment)) / compute_allocated_and_freed(stage.phases)
        for stage in stages
        for moment in stage.phases
        if moment.phase != "initialisation"
    )


def chosen_share(rows: Iterable[Scored]) -> float:
    """The share below which nine tenths of the ``rows`` lie, each source counting alike.

    So that one with many rows (nanotron) does not choose alone. 0 without rows.
    """
    by_source: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_source[read_source(row.mapped.row)].append(held_share(row))
    weighted = sorted((share, 1 / len(some)) for some in by_source.values() for share in some)
    below = 0.0
    for share, weight in weighted:
        below += weight
        if below >= SHARE * len(by_source) - 1e-9:
            return share
    return 0.0


def of_calibration(rows: Iterable[Scored]) -> list[Scored]:
    """Rows that the rule may read: of role ``calibration``, ``reserved`` or nvidia-smi's."""
    return [
        row
        for row in rows
        if row.mapped.row.get("role") == "calibration"
        and find_kind(row.mapped.row) in ("reserved", "nvidia-smi")
    ]


def gaps_report(rows: Sequence[Scored]) -> list[str]:
    """The lines of docs/accuracy.md about the band's top."""
    found = of_calibration(rows)
    if len(found) < 4:
        return []
    sources = {read_source(row.mapped.row) for row in found}
    return [
        "",
        f"The band's top was chosen by a rule (`tests/accuracy/memory_band.py`) from the {len(found)} rows "
        f"of role `calibration` and kinds `reserved` and `nvidia-smi`, of {len(sources)} sources. Of all "
        "that a step allocates and frees it is the share below which nine tenths of them lie with what they "
        "held beyond tensors, contexts and communicators, each source counting alike, and what ran "
        f"beside their plans described: {100 * chosen_share(found):.0f} % by the formulas of today; the "
        f"product has {overheads.FRAGMENTATION_HIGH_PERCENT} %. `judge` rows had no part in it. While the "
        "peak itself fits, the top is no more than the card has, for the allocator gives back what it holds "
        "before it gives up.",
    ]
