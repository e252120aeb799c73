"""The rule that sets the upper end of a band: the memory of published runs beyond tensors."""

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
"""Share of the rows, with sources weighted equally: the percentile of :func:`chosen_share`."""


def held_share(row: Scored) -> float:
    """Return the row's memory beyond tensors as a share of the bytes that its step allocates and frees.

    The smallest share with which the band's upper end reaches the measured figure, publisher's code included.
    From nvidia-smi's figures, contexts and communicators are subtracted first, at the sizes of the band's
    upper end. Negative where these alone exceed the measured figure.
    """
    plan = row.mapped.plan
    stages = on_ranks(row.mapped.row, predict_row(row.mapped)[0])
    gpu = plan.cluster.gpu
    outside_torch = 0
    if find_kind(row.mapped.row) == "nvidia-smi":
        outside_torch = overheads.estimate_runtime(gpu.vendor, gpu.architecture).high
        outside_torch += max(buffers.high for _, buffers in with_communication(plan, stages))
    return min(
        (row.measured - outside_torch - tensor_bytes(moment)) / compute_allocated_and_freed(stage.phases)
        for stage in stages
        for moment in stage.phases
        if moment.phase != "initialisation"
    )


def chosen_share(rows: Iterable[Scored]) -> float:
    """Return the 90th percentile of the shares of ``rows``, with sources weighted equally.

    So a source with many rows (nanotron) does not decide alone. 0 without rows.
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
    """Return the lines of docs/accuracy.md about the upper end of bands."""
    calibration = of_calibration(rows)
    if len(calibration) < 4:
        return []
    sources = {read_source(row.mapped.row) for row in calibration}
    return [
        "",
        f"A rule (`tests/accuracy/memory_band.py`) sets the upper end of a band from the {len(calibration)} "
        f"rows of role `calibration` and kinds `reserved` and `nvidia-smi`, from {len(sources)} sources. It "
        "takes each row's memory beyond tensors, CUDA contexts and communicators, publisher's code included, "
        "as a share of the bytes that a step allocates and frees. The 90th percentile of these shares, with "
        f"sources weighted equally, is {100 * chosen_share(calibration):.0f} % with the current formulas; "
        f"the product uses {overheads.FRAGMENTATION_HIGH_PERCENT} %. `judge` rows were not used. If the peak "
        "fits, the upper end is at most the GPU's usable memory, because the allocator frees its cache "
        "before it raises an out-of-memory error.",
    ]
