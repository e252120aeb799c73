"""The memory chart in words: what moment, what line, and every component of every tier with its formula."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from shardscope.memory.report import COMPONENTS, MemoryReport
from shardscope.memory.words import gib
from shardscope.planner.differences import differences
from shardscope.planner.room import beside_the_card
from shardscope_widgets.kit.theme import BESIDE_COLOURS, COMPONENT_COLOURS
from shardscope_widgets.kit.words import device_count, sentence
from shardscope_widgets.memory.rows import Shown, shown_stages


def caption(shown: Shown) -> str:
    """One line under the chart, and one more for a pair of plans, as HTML."""
    plan, report = shown.plan, shown.report
    num_stages, num_shown = len(report.by_stage), len(shown_stages(report))
    if num_stages == 1:
        alike = f"all {device_count(plan.cluster)} alike" if plan.world_size > 1 else "one GPU"
    else:
        alike = f"{num_stages} pipeline stages of {plan.world_size // plan.degrees.pp:,} ranks each"
        alike += f", {num_shown} shown" if num_shown < num_stages else ""
    sharers = plan.cluster.gpus_per_node if plan.cluster.gpu.memory_is_shared else 1
    line = (
        f"{alike} · peak {_moment(report)} · line: {gib(report.usable_bytes)} GiB usable of "
        f"{gib(plan.cluster.gpu.memory_bytes / sharers)} · likely {gib(report.low_bytes)} to "
        f"{gib(report.high_bytes)} GiB"
    )
    return "<br>".join(filter(None, (_pair(shown), line, _offloaded(shown), _measured(shown))))


def _moment(report: MemoryReport) -> str:
    backward = "as backward starts" if report.worst_stage.peak.fraction < 0.5 else "at the end of backward"
    return {
        "backward": backward,
        "forward": "at the end of forward",
        "optimizer": "in the optimizer step",
        "rest": "between steps",
        "initialisation": "while it is made",
    }[report.peak_phase]


def _pair(shown: Shown) -> str:
    """Which plan A is, what B changes of it, and what that does to the peak."""
    if shown.kept is None:
        return ""
    which = f"<b>A</b>: {sentence(shown.kept)}"
    changes = [str(difference) for difference in differences(shown.kept, shown.plan)]
    if not changes:
        return f"{which}<br><b>B is A as yet</b>: change anything to see the difference"
    before, after = shown.kept.memory().peak_bytes, shown.report.peak_bytes
    effect = "the same peak"
    if before != after:
        effect = f"{gib(abs(after - before))} GiB {'less' if after < before else 'more'} at the peak"
    return f"{which}<br><b>B instead of A</b>: {escape('; '.join(changes))} · {effect}"


def _offloaded(shown: Shown) -> str:
    """What is kept outside of the card, of how much that a node has."""
    parts = []
    for place in beside_the_card(shown.plan, shown.report):
        needed = gib(place.needed_bytes)
        on = (
            f"{needed} GiB on each node (how much it has is not known)"
            if place.room_bytes is None
            else f"{needed} of {gib(place.room_bytes)} GiB on each node"
        )
        each = f", {gib(place.rank_bytes)} GiB a rank" if shown.plan.cluster.gpus_per_node > 1 else ""
        parts.append(f"{place.name}: {on}{each}")
    return " · ".join(parts)


def _measured(shown: Shown) -> str:
    sentence = getattr(shown.reports.get("measured"), "sentence", "")
    return escape(sentence)


def table(shown: Shown) -> str:
    """Every component with its bytes in each tier; opening a row explains it."""
    columns = shown.columns
    one = len(columns) == 1
    unit = " GiB" if one else ""
    named = [name for name in (*COMPONENTS, "other") if name in COMPONENTS or _anywhere(name, columns)]
    rows = []
    for name in named:
        numbers = "".join(f"<em>{_amount(report, name, unit)}</em>" for report in columns.values())
        if one:
            share = 100 * shown.report.components[name] / max(1, shown.report.peak_bytes)
            numbers += f"<em>{share:.0f} %</em>"
        rows.append(
            f"<details name='ss-why'><summary><i style='background:{_colour(name)}'></i>"
            f"<span>{name.replace('_', ' ')}</span>{numbers}</summary>{_why(name, columns)}</details>"
        )
    report = shown.report
    worst = f" (stage {report.worst_stage.stage})" if len(report.by_stage) > 1 else ""
    head = f"<h2>At the peak{worst} <span class='ss-hint'>open a row for its formula</span></h2>"
    if one:
        return f"{head}<div class='ss-legend'>{''.join(rows)}</div>"
    titles = "".join(f"<em>{title}</em>" for title in columns)
    return (
        f"{head}<div class='ss-legend ss-tiers' style='--ss-columns:{len(columns)}'>"
        f"<div class='ss-titles'><i></i><span>GiB</span>{titles}</div>{''.join(rows)}</div>"
    )


def _anywhere(name: str, columns: Mapping[str, MemoryReport]) -> bool:
    return any(name in report.components for report in columns.values())


def _amount(report: MemoryReport, name: str, unit: str) -> str:
    """Bytes in GiB; a dash where a tier could not tell a component apart."""
    return f"{gib(report.components[name])}{unit}" if name in report.components else "–"


def _why(name: str, columns: Mapping[str, MemoryReport]) -> str:
    lines = []
    for title, report in columns.items():
        if name not in report.components and name not in COMPONENTS:
            continue
        words = report.explain(name)
        why = words.partition(" = ")[2] or words.partition(": ")[2]
        heading = f"<b>{title}</b> " if len(columns) > 1 else ""
        lines.append(f"<p>{heading}{escape(why)}</p>")
    return "".join(lines)


def _colour(name: str) -> str:
    return {**COMPONENT_COLOURS, **BESIDE_COLOURS}[name]
