"""Kinds of memory measurements, and the predicted bytes that each is compared with."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from tests.accuracy.rows import Row, join_fields

from shardscope.memory.overheads import libraries as overheads
from shardscope.memory.overheads.band import TENSORS, compute_allocated_and_freed
from shardscope.memory.report import MemoryReport, PhaseMemory, StageMemory

GIB = 2**30
Kind = Literal["allocated", "reserved", "nvidia-smi", "unknown"]


class Compared(NamedTuple):
    """Predicted bytes that a row's figure is compared with."""

    low: int
    point: int
    high: int
    components: dict[str, int]
    """In the phase of the point prediction."""


def find_kind(row: Row) -> Kind:
    """Return which bytes the row's peak counts."""
    text = join_fields(row, "memory_kind")
    if "reserved" in text:
        return "reserved"
    if "alloc" in text or "active" in text:
        return "allocated"
    if re.search(r"nvidia|smi|device|nvml|nvitop|gpustat|wandb|mem_get_info|process", text):
        return "nvidia-smi"
    return "unknown"


def measured_bytes(row: Row) -> float:
    """Return the row's peak: in GiB, as its field is named, or in GB where the row states decimal GB.

    Megatron-Bridge prints bytes / 1e9 to five digits (training/utils/train_utils.py, ``report_memory``). Its
    pages call the same figures GB here and GiB there, and all have those five digits (158.220, 62.166).
    """
    text = join_fields(row, "memory_kind")
    converted = "peak_memory_gib" in str(row.get("derived_fields"))
    decimal = (
        re.search(r"\bgb\b", text) and "treated as gib" not in join_fields(row, "notes") and not converted
    )
    if "NVIDIA-NeMo/Megatron-Bridge" in str(row.get("source_url")):
        decimal = True
    return float(row["peak_memory_gib"]) * (1e9 if decimal else GIB)


def predict_measured_kind(row: Row, report: MemoryReport, held_back: int = 0) -> Compared:
    """Predict the bytes of the row's kind of measurement, on the ranks that it is about.

    Up to ``held_back`` bytes stay reserved that no tensor uses: how many is chance, so half is the point.
    They are some of what the band's top allows the allocator in any case, not more on top of it.
    """
    stages, what = on_ranks(row, report), find_kind(row)
    if what == "allocated":
        point, moment = max(_list_tensor_bytes(stages), key=lambda found: found[0])
        return Compared(point, point, point, dict(moment.components))
    if what == "reserved":
        low, point, high, moment = _with_gaps(stages)
        held = max(0, min(held_back, report.usable_bytes - point))
        high = overheads.limit_to_usable(max(high, point + held_back), point, report.usable_bytes, True)
        return Compared(low, point + held // 2, high, dict(moment.components))
    if what == "unknown":
        # Most frameworks print allocated bytes; the publisher may have read nvidia-smi.
        point, moment = max(_list_tensor_bytes(stages), key=lambda found: found[0])
        return Compared(point, point, report.high_bytes, dict(moment.components))
    return Compared(report.low_bytes, report.peak_bytes, report.high_bytes, dict(report.components))


def on_ranks(row: Row, report: MemoryReport) -> tuple[StageMemory, ...]:
    """Return the stages that the row measures: the first one, or all."""
    return report.by_stage[:1] if "rank 0" in join_fields(row, "memory_kind", "notes") else report.by_stage


def _list_tensor_bytes(stages: tuple[StageMemory, ...]) -> list[tuple[int, PhaseMemory]]:
    return [(tensor_bytes(moment), moment) for stage in stages for moment in stage.phases]


def tensor_bytes(moment: PhaseMemory) -> int:
    """Return the bytes of all tensors of a phase, which torch counts as allocated."""
    return sum(term[0] for name, term in moment.terms.items() if name in TENSORS)


def _with_gaps(stages: tuple[StageMemory, ...]) -> tuple[int, int, int, PhaseMemory]:
    low = high = 0
    for stage in stages:
        held = overheads.estimate_fragmentation(compute_allocated_and_freed(stage.phases), True).high
        for moment in stage.phases:
            tensors = tensor_bytes(moment)
            gaps = 0 if moment.phase == "initialisation" else held
            low, high = max(low, tensors), max(high, tensors + gaps)
    moments = [moment for stage in stages for moment in stage.phases]
    fullest = max(moments, key=_with_fragmentation)
    return low, _with_fragmentation(fullest), high, fullest


def _with_fragmentation(moment: PhaseMemory) -> int:
    gaps = moment.terms.get("fragmentation")
    return tensor_bytes(moment) + (gaps[0] if gaps else 0)
