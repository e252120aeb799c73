"""Text of the memory view: the caption of the chart, and the table of components with their formulas."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from shardscope.core.number_format import format_gib
from shardscope.memory.report import COMPONENTS, MemoryReport
from shardscope.planner.checks.sharding import has_ranks_without_experts
from shardscope.planner.memory_needs import list_host_and_nvme_needs
from shardscope_widgets.kit.display_names import count_devices
from shardscope_widgets.kit.part_table import NOT_REPORTED, Column, PartRow, add_sign, render_part_table
from shardscope_widgets.kit.theme import (
    BESIDE_COLOURS,
    COMPONENT_COLOURS,
    COMPONENT_PATTERNS,
    PATTERN_CLASSES,
)
from shardscope_widgets.memory.rows import TIERS, Mode, ShownMemory, choose_stages

TOTAL = "total"
MIN_SHOWN_BYTES = 0.0001 * 2**30
"""Smallest amount shown as a number."""
OUTSIDE = {"host memory": "host", "NVMe": "nvme"}
"""Rows of memory outside the GPU, by display name."""


def write_caption(shown: ShownMemory, mode: Mode = "peak") -> str:
    """Return the caption of the chart: the ranks, the phase, the usable memory and the likely range."""
    plan, report = shown.plan, shown.report
    sharers = plan.cluster.gpus_per_node if plan.cluster.gpu.memory_is_shared else 1
    parts = [
        _describe_ranks(shown, mode),
        f"peak {_describe_phase(report)}",
        f"{format_gib(report.usable_bytes)} GiB usable of "
        f"{_round_gib(plan.cluster.gpu.memory_bytes / sharers)}",
        f"likely {_format_range(report)} GiB",
        *_describe_outside_memory(shown),
    ]
    return escape(" · ".join(parts))


def _format_range(report: MemoryReport) -> str:
    low, high = _round_gib(report.low_bytes), _round_gib(report.high_bytes)
    return low if low == high else f"{low} to {high}"


def _describe_ranks(shown: ShownMemory, mode: Mode) -> str:
    plan, report = shown.plan, shown.report
    num_stages = len(report.by_stage)
    if num_stages == 1:
        devices = count_devices(plan.cluster)
        if plan.world_size == 1:
            return f"on one {devices.partition(' ')[2]}"
        return f"{'fullest of' if has_ranks_without_experts(plan) else 'same on all'} {devices}"
    ranks = f"{plan.world_size // plan.degrees.pp:,} ranks each"
    num_shown = len(choose_stages(report))
    if mode == "stages" and num_shown < num_stages:
        return f"{num_shown} of {num_stages} pipeline stages shown, {ranks}"
    return f"stage {report.worst_stage.stage}, the fullest of {num_stages}, {ranks}"


def _describe_phase(report: MemoryReport) -> str:
    # Backward is the longest phase: its start and its end have different peaks.
    early = report.worst_stage.peak.fraction < 0.5
    return {
        "backward": f"at the {'start' if early else 'end'} of backward",
        "forward": "at the end of forward",
        "optimizer": "in the optimizer step",
        "rest": "between steps",
        "initialisation": "while the model is initialized",
    }[report.peak_phase]


def _round_gib(num_bytes: float) -> str:
    """Return GiB without decimals that would overstate the precision: ``52``, ``7.4``, ``80.0``."""
    value = num_bytes / 2**30
    return format_gib(num_bytes) if value < 9.5 or value == round(value) else f"{value:,.0f}"


def _describe_outside_memory(shown: ShownMemory) -> list[str]:
    """Return the memory that the plan uses outside the GPU, and the node's capacity of it."""
    parts = []
    for place in list_host_and_nvme_needs(shown.plan, shown.report):
        needed = format_gib(place.needed_bytes)
        amount = (
            f"{needed} GiB on each node (capacity unknown)"
            if place.room_bytes is None
            else f"{needed} of {format_gib(place.room_bytes)} GiB on each node"
        )
        per_rank = (
            f", {format_gib(place.rank_bytes)} GiB per rank" if shown.plan.cluster.gpus_per_node > 1 else ""
        )
        parts.append(f"{place.name}: {amount}{per_rank}")
    return parts


def render_component_table(shown: ShownMemory) -> str:
    """Return the table: one row per component, largest first; a row expands to its formula and source."""
    columns = [_build_tier_column(shown, tier) for tier in TIERS]
    for index, pin in enumerate(shown.pins):
        columns += Column.for_pin(index, pin.name)
    reports = [*shown.reports.values(), *(pin.report for pin in shown.pins)]
    names = [name for name in (*COMPONENTS, "other") if any(name in report.components for report in reports)]
    # Stable, so that components of equal size keep the order of COMPONENTS.
    names.sort(key=lambda name: -max(shown.report.components.get(name, 0), 0))
    rows = [_build_component_row(shown, name) for name in names]
    rows.append(_build_total_row(shown))
    # Below the total, which is the GPU's.
    rows += [
        _build_outside_row(shown, place_name, len(columns)) for place_name in _list_outside_memory(shown)
    ]
    stage = shown.report.worst_stage.stage
    corner = "GiB, at the peak" + (f" of stage {stage}" if len(shown.report.by_stage) > 1 else "")
    return render_part_table(corner, columns, rows)


def _build_tier_column(shown: ShownMemory, tier: str) -> Column:
    report = shown.reports.get(tier)
    hint = {
        "predicted": "computed with formulas",
        "rehearsed": "the framework's own code, run on fake tensors",
        "measured": getattr(report, "sentence", ""),
    }[tier]
    return Column(tier, hint if report else "", is_empty=report is None)


def _build_component_row(shown: ShownMemory, name: str) -> PartRow:
    cells = [_format_tier_cell(shown.reports.get(tier), name) for tier in TIERS]
    current = shown.report.components.get(name, 0)
    for pin in shown.pins:
        pinned = pin.report.components.get(name, 0)
        cells += [_format_amount(pinned), add_sign(current - pinned, _format_amount(abs(current - pinned)))]
    return PartRow(name, name.replace("_", " "), cells, _render_explanation(shown, name), render_swatch(name))


def _build_total_row(shown: ShownMemory) -> PartRow:
    report = shown.report
    cells = [_format_total_cell(shown.reports.get(tier)) for tier in TIERS]
    for pin in shown.pins:
        difference = report.peak_bytes - pin.report.peak_bytes
        cells += [
            _format_amount(pin.report.peak_bytes),
            add_sign(difference, _format_amount(abs(difference))),
        ]
    lines = [
        f"The sum at the peak, {_describe_phase(report)}. Library buffers and the allocator may take less or "
        f"more: likely {format_gib(report.low_bytes)} to {format_gib(report.high_bytes)} GiB.",
        getattr(shown.reports.get("measured"), "sentence", ""),
    ]
    why = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
    return PartRow(TOTAL, TOTAL, cells, why, is_total=True)


def _list_outside_memory(shown: ShownMemory) -> list[str]:
    """Return the names of the memory outside the GPU that the plan or a pinned one needs."""
    plans = [(shown.plan, shown.report), *((pin.plan, pin.report) for pin in shown.pins)]
    needed = {place.name for plan, report in plans for place in list_host_and_nvme_needs(plan, report)}
    return [name for name in OUTSIDE if name in needed]


def _build_outside_row(shown: ShownMemory, place_name: str, num_columns: int) -> PartRow:
    def sum_rank_bytes(plan: object, report: MemoryReport) -> int:
        memories = list_host_and_nvme_needs(plan, report)  # type: ignore[arg-type]
        return sum(place.rank_bytes for place in memories if place.name == place_name)

    current = sum_rank_bytes(shown.plan, shown.report)
    cells = [_format_amount(current), "", ""]
    for pin in shown.pins:
        pinned = sum_rank_bytes(pin.plan, pin.report)
        cells += [_format_amount(pinned), add_sign(current - pinned, _format_amount(abs(current - pinned)))]
    assert len(cells) == num_columns
    description = next((line for line in _describe_outside_memory(shown) if line.startswith(place_name)), "")
    key = OUTSIDE[place_name]
    return PartRow(
        key, f"{place_name}, outside the GPU", cells, f"<p>{escape(description)}</p>", render_swatch(key)
    )


def _format_tier_cell(report: MemoryReport | None, name: str) -> str:
    """Return a component's GiB in a tier, or a dash if the tier could not measure it separately."""
    if report is None:
        return ""
    return _format_amount(report.components[name]) if name in report.components else NOT_REPORTED


def _format_total_cell(report: MemoryReport | None) -> str:
    return "" if report is None else _format_amount(report.peak_bytes)


def _format_amount(num_bytes: float) -> str:
    # Kilobytes would be shown as 1.9e-06 in a column of GiB.
    if 0 < num_bytes < MIN_SHOWN_BYTES:
        return f"<{format_gib(MIN_SHOWN_BYTES)}"
    return format_gib(num_bytes) if num_bytes else "0"


def render_swatch(name: str) -> str:
    """Return the component's colour and pattern as in the chart."""
    colour = {**COMPONENT_COLOURS, **BESIDE_COLOURS}[name]
    pattern = COMPONENT_PATTERNS.get(name, "")
    # Dark lines on the light colours of memory that belongs to no component of the plan.
    kind = " ss-hatched" if pattern == "/" else f" {PATTERN_CLASSES[pattern]}" if pattern else ""
    return f"<i class='ss-mark{kind}' style='background-color:{colour}'></i>"


def _render_explanation(shown: ShownMemory, name: str) -> str:
    """Return the component's formula and source in every tier that has one."""
    reports: dict[str, MemoryReport] = {tier: shown.reports[tier] for tier in TIERS if tier in shown.reports}
    lines = _list_formulas(reports, name)
    return "".join(f"<p><b>{title}</b> {escape(formula)}</p>" for title, formula in lines)


def _list_formulas(reports: Mapping[str, MemoryReport], name: str) -> list[tuple[str, str]]:
    lines = []
    for title, report in reports.items():
        if name not in report.components and name not in COMPONENTS:
            continue
        # "name = formula" or "name: why"; the row already shows the name.
        formula = report.explain(name)
        lines.append((title, formula.partition(" = ")[2] or formula.partition(": ")[2] or formula))
    return lines
