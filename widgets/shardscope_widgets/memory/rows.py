"""Rows of the memory chart: tiers, pinned plans, pipeline stages, host memory and NVMe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from textwrap import wrap
from typing import Literal, NamedTuple

import shardscope as ss
from shardscope.core.number_format import format_gib
from shardscope.memory.report import MemoryReport, StageMemory
from shardscope.planner.memory_needs import list_host_and_nvme_needs
from shardscope_widgets.kit.pins import PinName, name_pins

Mode = Literal["peak", "step", "stages"]
MAX_STAGES = 16
TIERS = ("predicted", "rehearsed", "measured")
EMPTY_NOTES = {
    "rehearsed": "not rehearsed yet",
    "measured": "plan not run yet",
}
TOOLTIP_CHARACTERS = 72
TOOLTIP_LINES = 6
"""Most lines of a tooltip: plotly omits one that is higher than the chart (7 lines are 126 of 118 pixels)."""


class Bar(NamedTuple):
    """One row of the chart."""

    key: str
    """Its category on the chart's axis, which is unique."""
    label: str
    components: Mapping[str, int]
    """Component -> bytes; empty while there is no data."""
    capacity_bytes: int
    """Capacity of the memory in bytes; 0 if unknown."""
    explain: Callable[[str], str] = lambda name: ""
    """A function that returns a component's tooltip as HTML."""
    band: tuple[int, int] | None = None
    """The minimum and maximum of the peak."""
    note: str = ""
    """Text shown in place of an empty bar."""
    is_on_gpu: bool = True

    @property
    def total(self) -> int:
        """Total bytes of the bar."""
        return sum(self.components.values())


class Pin(NamedTuple):
    """A pinned plan, compared with the current plan."""

    name: PinName
    plan: ss.Plan
    report: MemoryReport
    """Its memory prediction."""


class ShownMemory(NamedTuple):
    """The current plan, its reports by tier, and the pinned plans."""

    plan: ss.Plan
    reports: Mapping[str, MemoryReport]
    """Tier -> report; ``predicted`` is always present."""
    pins: tuple[Pin, ...] = ()
    tiers: tuple[str, ...] = TIERS
    """Tiers with a row, also before there is a report."""

    @property
    def report(self) -> MemoryReport:
        """The prediction."""
        return self.reports["predicted"]


def pin_plans(pins: tuple[ss.Plan, ...], plan: ss.Plan) -> tuple[Pin, ...]:
    """Return ``pins`` with their predictions and their names relative to ``plan``."""
    named = zip(name_pins(pins, plan), pins, strict=True)
    return tuple(Pin(name, pin, pin.memory()) for name, pin in named)


def list_bars(shown: ShownMemory, mode: Mode = "peak") -> list[Bar]:
    """Return every row from top to bottom: GPUs first, then host memory and NVMe."""
    rows = (
        _build_stage_bars(shown) if mode == "stages" else [*_build_tier_bars(shown), *_build_pin_bars(shown)]
    )
    return [*rows, *_build_offload_bars(shown)]


def _build_tier_bars(shown: ShownMemory) -> list[Bar]:
    """Return the worst rank in each tier; a tier without a report keeps its row."""
    rows = []
    for tier in shown.tiers:
        report = shown.reports.get(tier)
        if report is None:
            rows.append(Bar(tier, tier, {}, shown.report.usable_bytes, note=EMPTY_NOTES[tier]))
        else:
            band = (report.low_bytes, report.high_bytes) if tier == "predicted" else None
            rows.append(_build_bar(tier, tier, tier, report.worst_stage, report, band))
    return rows


def _build_pin_bars(shown: ShownMemory) -> list[Bar]:
    rows = []
    for index, pin in enumerate(shown.pins):
        title = f"pinned, predicted: {pin.name.full}"
        rows.append(_build_bar(f"pin {index}", pin.name.short, title, pin.report.worst_stage, pin.report))
    return rows


def _build_stage_bars(shown: ShownMemory) -> list[Bar]:
    """Return the prediction of every pipeline stage, with the band at the worst one."""
    report = shown.report
    rows = []
    for stage in choose_stages(report):
        label = f"stage {stage.stage}"
        is_worst = stage.stage == report.worst_stage.stage
        band = (report.low_bytes, report.high_bytes) if is_worst else None
        rows.append(_build_bar(label, label, f"{label}, predicted", stage, report, band))
    return rows


def choose_stages(report: MemoryReport) -> list[StageMemory]:
    """Return all stages, or if there are many, evenly spaced ones with the first, the last and the worst."""
    stages = list(report.by_stage)
    if len(stages) <= MAX_STAGES:
        return stages
    # The first and the last stage have the embedding and the head; the worst one decides whether it fits.
    step = (len(stages) - 1) / (MAX_STAGES - 1)
    chosen = {round(index * step) for index in range(MAX_STAGES)} | {report.worst_stage.stage}
    return [stages[index] for index in sorted(chosen)]


def _build_bar(
    key: str,
    label: str,
    title: str,
    stage: StageMemory,
    report: MemoryReport,
    band: tuple[int, int] | None = None,
) -> Bar:
    """Return the row of one stage's peak; ``title`` is the heading of its tooltips."""
    terms = stage.peak.terms

    def explain(name: str) -> str:
        term = terms.get(name)  # type: ignore[call-overload]
        if term is None:
            return ""
        heading = f"<b>{name.replace('_', ' ')}: {format_gib(term.num_bytes)} GiB</b>, {escape(title)}"
        # The row has the whole text.
        formula = wrap(
            escape(term.explain()), TOOLTIP_CHARACTERS, max_lines=TOOLTIP_LINES - 1, placeholder=" …"
        )
        return "<br>".join([heading, *formula])

    has_band = band is not None and band[0] < band[1]
    return Bar(key, label, stage.components, report.usable_bytes, explain, band if has_band else None)


def _build_offload_bars(shown: ShownMemory) -> list[Bar]:
    """Return a rank's host memory and NVMe next to its share of the node's capacity."""
    rows = []
    for place in list_host_and_nvme_needs(shown.plan, shown.report):
        label, component = ("NVMe", "nvme") if place.name == "NVMe" else ("host", "host")
        # The chart shows one rank, so a node's capacity is divided among its ranks.
        share = (place.room_bytes or 0) // shown.plan.cluster.gpus_per_node
        text = f"<b>{label}: {format_gib(place.rank_bytes)} GiB per rank</b><br>" + (
            f"of its {format_gib(share)} GiB share of the node's"
            if share
            else "the node's capacity is unknown"
        )
        explain: Callable[[str], str] = lambda name, text=text: text  # type: ignore[misc] # noqa: E731
        sizes = {component: place.rank_bytes}
        rows.append(Bar(label, label, sizes, share, explain, is_on_gpu=False))
    return rows
