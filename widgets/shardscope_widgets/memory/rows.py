"""The bars of the memory chart: one for each tier, stage, kept plan, and for the host and its NVMe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from textwrap import wrap
from types import MappingProxyType
from typing import NamedTuple

import shardscope as ss
from shardscope.memory.report import MemoryReport, StageMemory
from shardscope.memory.words import gib
from shardscope.planner.room import beside_the_card

MAX_STAGES = 16
TIERS = ("predicted", "rehearsed", "measured")
WAITING = {"rehearsed": "not rehearsed yet", "measured": "no run of this plan yet"}


class Bar(NamedTuple):
    """One row of the chart."""

    label: str
    components: Mapping[str, int]
    """Component -> bytes; empty while there is nothing to show."""
    capacity_bytes: int
    """What is there to be filled; 0: not known."""
    explain: Callable[[str], str] = lambda name: ""
    band: tuple[int, int] | None = None
    """The least and the most that the peak may be."""
    note: str = ""
    """What stands in the place of an empty bar."""

    @property
    def total(self) -> int:
        """Bytes of the whole bar."""
        return sum(self.components.values())


class Shown(NamedTuple):
    """What the view shows: a plan's reports by tier, and a plan kept beside it."""

    plan: ss.Plan
    reports: Mapping[str, MemoryReport]
    """Tier -> report; ``predicted`` is always there."""
    kept: ss.Plan | None = None
    kept_reports: Mapping[str, MemoryReport] = MappingProxyType({})
    """The kept plan's, by tier; of none where there is no such plan."""

    @property
    def columns(self) -> dict[str, MemoryReport]:
        """Each report under its name: its tier, and of two plans A and B whose it is."""
        if self.kept is None:
            return {tier: self.reports[tier] for tier in TIERS if tier in self.reports}
        pair = (("A", self.kept_reports), ("B", self.reports))
        return {whose(plan, tier): found[tier] for plan, found in pair for tier in TIERS if tier in found}

    @property
    def report(self) -> MemoryReport:
        """The prediction."""
        return self.reports["predicted"]


def whose(plan: str, tier: str) -> str:
    """``A`` for what is predicted of it, ``A rehearsed`` and ``A measured``."""
    return plan if tier == "predicted" else f"{plan} {tier}"


def bars_of(shown: Shown) -> list[Bar]:
    """Every row, from top to bottom; the GPUs' first, then the host's and the NVMe's."""
    if shown.kept is not None:
        rows = [_bar(label, report.worst_stage, report) for label, report in shown.columns.items()]
    elif len(shown.report.by_stage) == 1:
        rows = _tier_bars(shown)
    else:
        rows = _stage_bars(shown)
    return [*rows, *_offload_bars(shown)]


def _tier_bars(shown: Shown) -> list[Bar]:
    """The worst rank in each tier; a tier that is not there yet keeps its place."""
    rows = []
    for tier in TIERS:
        report = shown.reports.get(tier)
        if report is not None:
            rows.append(_bar(tier, report.worst_stage, report))
        else:
            rows.append(Bar(tier, {}, shown.report.usable_bytes, note=WAITING[tier]))
    return rows


def _stage_bars(shown: Shown) -> list[Bar]:
    rows = []
    for stage in shown_stages(shown.report):
        rows.append(_bar(f"stage {stage.stage}", stage, shown.report))
        for tier in TIERS[1:]:
            report = shown.reports.get(tier)
            same = [s for s in report.by_stage if s.stage == stage.stage] if report else []
            rows += [_bar(f"{s.stage} {tier}", s, report) for s in same if report is not None]
    return rows


def shown_stages(report: MemoryReport) -> list[StageMemory]:
    """All stages; of many, evenly chosen ones, the first, the last and the worst among them."""
    stages = list(report.by_stage)
    if len(stages) <= MAX_STAGES:
        return stages
    step = (len(stages) - 1) / (MAX_STAGES - 1)
    chosen = {round(index * step) for index in range(MAX_STAGES)} | {report.worst_stage.stage}
    return [stages[index] for index in sorted(chosen)]


def _bar(label: str, stage: StageMemory, report: MemoryReport) -> Bar:
    terms = stage.peak.terms

    def explain(name: str) -> str:
        term = terms.get(name)  # type: ignore[call-overload]
        if term is None:
            return ""
        lines = wrap(escape(term.explain()), 72)
        return "<br>".join([f"<b>{name.replace('_', ' ')}: {gib(term.num_bytes)} GiB</b>", *lines])

    is_worst = stage.stage == report.worst_stage.stage
    band = (report.low_bytes, report.high_bytes)
    return Bar(
        label,
        stage.components,
        report.usable_bytes,
        explain,
        band=band if is_worst and band[0] < band[1] else None,
    )


def _offload_bars(shown: Shown) -> list[Bar]:
    """What a rank keeps outside of its card, against its share of the node's host memory and NVMe."""
    rows = []
    for place in beside_the_card(shown.plan, shown.report):
        label, component = ("NVMe", "nvme") if place.name == "NVMe" else ("host", "host")
        share = (place.room_bytes or 0) // shown.plan.cluster.gpus_per_node
        words = f"<b>{label}: {gib(place.rank_bytes)} GiB a rank</b><br>" + (
            f"of its {gib(share)} GiB share of the node's" if share else "the node's size is not known"
        )
        rows.append(Bar(label, {component: place.rank_bytes}, share, lambda name, words=words: words))  # type: ignore[misc]
    return rows
