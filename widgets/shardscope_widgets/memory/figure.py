"""The chart of the memory view: bars at the peak or by stage, or the timeline of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

import plotly.graph_objects as go

from shardscope.core.number_format import format_gib
from shardscope.memory.report import COMPONENTS, MemoryReport
from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.kit.pins import wrap_label
from shardscope_widgets.kit.theme import BESIDE_COLOURS, COMPONENT_COLOURS, COMPONENT_PATTERNS, FONT
from shardscope_widgets.memory.rows import Bar, Mode, ShownMemory, list_bars

GIB = 2**30
ROW_PIXELS, STAGE_PIXELS, TOP_PIXELS, BOTTOM_PIXELS = 32, 20, 2, 20
LEFT_PIXELS, RIGHT_PIXELS = 96, 108
TIMELINE_LABEL_PIXELS = 14
NOTE_SHARE = 0.65
"""Capacity, as a fraction of the axis, from which the note of an empty row has room left of its mark, even in
a chart of 360 pixels."""
TIMELINE_END = 0.98
PHASES = (("forward", 0.0), ("backward", 0.34), ("optimizer", TIMELINE_END))
INK = "#7f8790"
SMALL = {"size": 12}
FULL_DOMAIN, COLLAPSED_DOMAIN = (0, 1), (0, 0.001)
"""Domains of the subplots, as fractions of the figure."""
NAMES = (*COMPONENTS, *BESIDE_COLOURS)
MAX_PIN_TIMELINES = 4
TIMELINES = ("rehearsed", "measured", *(f"pin {index}" for index in range(MAX_PIN_TIMELINES)))
DASHES = ("dash", "dot", "dashdot", "longdash", "longdashdot", "5px 2px 2px 2px")
DASH_SIGNS = ("– –", "···", "– ·", "— —", "— ·", "–··")


def _build_pattern(name: str) -> dict[str, object]:
    pattern = {"shape": COMPONENT_PATTERNS.get(name, ""), "size": 5, "solidity": 0.25}
    # Lines are light on dark colours.
    light = {"fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.75)"}
    return {**pattern, **light} if name == "communication" else pattern


def create_memory_figure(on_component: Callable[[str], None]) -> Chart:
    """Return the chart with all traces and axes but no data; :func:`draw_memory` fills it repeatedly.

    ``on_component`` receives the name of the component whose bar or area was clicked.
    """
    # All traces exist from the start: drawing only fills them, in one update.
    bars = [
        go.Bar(
            name=name.replace("_", " "),
            orientation="h",
            marker={
                "color": {**COMPONENT_COLOURS, **BESIDE_COLOURS}[name],
                "line": {"width": 0},
                "pattern": _build_pattern(name),
            },
            hovertemplate="%{customdata}<extra></extra>",
        )
        for name in NAMES
    ]
    areas = [
        go.Scatter(
            name=name.replace("_", " "),
            xaxis="x2",
            yaxis="y2",
            stackgroup="bytes",
            mode="lines",
            line={"width": 0, "color": COMPONENT_COLOURS[name]},
            fillcolor=COMPONENT_COLOURS[name],
            hovertemplate=f"{name.replace('_', ' ')} %{{y:,.3r}} GiB<extra></extra>",
        )
        for name in COMPONENTS
    ]
    lines = [
        go.Scatter(
            name=name,
            xaxis="x2",
            yaxis="y2",
            mode="lines+markers",
            marker={"size": 5},
            line={"width": 1.5, "color": INK, "dash": dash},
            hovertemplate="%{customdata} %{y:,.3r} GiB<extra></extra>",
        )
        for name, dash in zip(TIMELINES, DASHES, strict=True)
    ]
    figure = Chart([*bars, *areas, *lines], layout=_build_layout())
    figure.label = "Memory of a GPU by component. The table below has the numbers."
    figure._config = {"displayModeBar": False, "responsive": True}
    # Trace indices of bars, then of areas; the lines after them have no row in the table.
    clickable = (*NAMES, *COMPONENTS)

    def report_click(trace: int, point: int, customdata: object) -> None:
        if trace < len(clickable):
            on_component(clickable[trace])

    figure.on_click(report_click)
    return figure


def _build_layout() -> dict[str, object]:
    return {
        "barmode": "stack",
        "bargap": 0.2,
        "autosize": True,
        "margin": {"l": LEFT_PIXELS, "r": RIGHT_PIXELS, "t": TOP_PIXELS, "b": BOTTOM_PIXELS},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "font": FONT,
        "hovermode": "closest",
        "hoverlabel": {"align": "left"},
        # Totals are in the right margin and the capacity is below its mark: an axis would only add clutter.
        "xaxis": {
            "showgrid": False,
            "showticklabels": False,
            "zeroline": False,
            "fixedrange": True,
            "anchor": "y",
        },
        "yaxis": {
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "type": "category",
            "ticks": "outside",
            "ticklen": 6,
            "tickcolor": "rgba(0,0,0,0)",
            "tickfont": SMALL,
        },
        "xaxis2": {
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "range": [0, 1.0],
            "tickvals": [0.17, 0.6, 0.99],
            "ticktext": ["forward", "backward", "optimizer"],
            "tickangle": 0,
            "tickfont": SMALL,
            "anchor": "y2",
        },
        "yaxis2": {
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "nticks": 4,
            "ticksuffix": " GiB",
            "tickfont": SMALL,
        },
        # No animation: the frames between two plans would show plans that do not exist.
    }


def draw_memory(figure: Chart, shown: ShownMemory, mode: Mode = "peak") -> None:
    """Show a plan's bars, stages or timeline in ``figure``, in one update."""
    rows = list_bars(shown, mode)
    pixels = STAGE_PIXELS if mode == "stages" else ROW_PIXELS
    # The timeline is as high as the bars, so that the content below does not move.
    inner = max(ROW_PIXELS * len(shown.tiers), pixels * len(rows))
    is_timeline = mode == "step"
    # Of two overlapping subplots the upper one receives all clicks and hovers, so the other is collapsed.
    bars_domain, timeline_domain = (
        (COLLAPSED_DOMAIN, FULL_DOMAIN) if is_timeline else (FULL_DOMAIN, COLLAPSED_DOMAIN)
    )
    layout: dict[str, object] = {
        "xaxis.domain": bars_domain,
        "yaxis.domain": bars_domain,
        "xaxis2.domain": timeline_domain,
        "yaxis2.domain": timeline_domain,
        "height": inner + TOP_PIXELS + BOTTOM_PIXELS,
        "xaxis.visible": not is_timeline,
        "yaxis.visible": not is_timeline,
        "xaxis2.visible": is_timeline,
        "yaxis2.visible": is_timeline,
    }
    # Invisible traces stay empty: filling them takes half of a redraw's time.
    if is_timeline:
        hidden: list[dict[str, object]] = [{"visible": False}] * len(NAMES)
        overlays = _list_overlays(shown)
        layout |= _build_timeline_layout(shown, overlays, inner)
        figure.redraw([*hidden, *_build_areas(shown.report), *_build_lines(overlays)], layout)
    else:
        hidden = [{"visible": False}] * (len(COMPONENTS) + len(TIMELINES))
        figure.redraw([*_build_bars(rows), *hidden], {**layout, **_build_bars_layout(rows, inner)})


# Bars


def _build_bars(rows: list[Bar]) -> list[dict[str, object]]:
    """Return each component's part of every bar that has data."""
    # Empty rows have a note instead of bars of no length.
    filled = [row for row in rows if row.components]
    return [
        {
            "visible": True,
            "y": [row.key for row in filled],
            "x": [row.components.get(name, 0) / GIB for row in filled],
            "customdata": [row.explain(name) for row in filled],
        }
        for name in NAMES
    ]


def _build_bars_layout(rows: list[Bar], inner_pixels: int) -> dict[str, object]:
    widest = _find_axis_end(rows)
    # Labels may repeat, and plotly would merge equal categories: the axis has keys, and labels as tick text.
    keys = [row.key for row in rows]
    # Rows keep their height and start at the top if they do not fill the chart.
    height = max(
        1.0, inner_pixels / len(rows) / (STAGE_PIXELS if rows[0].key.startswith("stage") else ROW_PIXELS)
    )
    return {
        "xaxis.range": [0, widest],
        "yaxis.range": [len(rows) * height - 0.5, -0.5],
        "yaxis.categoryorder": "array",
        "yaxis.categoryarray": keys,
        "yaxis.tickvals": keys,
        "yaxis.ticktext": [wrap_label(row.label) for row in rows],
        "shapes": _build_capacity_marks(rows),
        "annotations": [
            *(_build_total_label(row, widest) for row in rows),
            _build_capacity_label(rows, widest),
        ],
    }


def _find_axis_end(rows: list[Bar]) -> float:
    """Return the end of the axis in GiB, which covers every bar, band and capacity."""
    ends = [max(row.total * 1.01, row.band[1] * 1.01 if row.band else 0) for row in rows]
    capacities = [row.capacity_bytes * 1.01 for row in rows if row.is_on_gpu]
    # A node's share of host memory may be far longer than all bars: its mark is then out of range.
    shares = [min(row.capacity_bytes * 1.01, max(ends)) for row in rows if not row.is_on_gpu]
    return max((*ends, *capacities, *shares)) / GIB


def _build_capacity_marks(rows: list[Bar]) -> list[dict[str, object]]:
    """Return each row's capacity and, for bars that have one, the band from minimum to maximum."""
    marks = []
    thick = {"type": "line", "xref": "x", "yref": "y", "line": {"width": 2, "color": INK}}
    thin = {**thick, "line": {"width": 1, "color": INK}}
    for index, row in enumerate(rows):
        if row.capacity_bytes:
            end = row.capacity_bytes / GIB
            marks.append({**thick, "x0": end, "x1": end, "y0": index - 0.5, "y1": index + 0.5})
        if row.band:
            low, high = (value / GIB for value in row.band)
            marks.append({**thin, "x0": low, "x1": high, "y0": index, "y1": index})
            marks += [
                {**thin, "x0": end_, "x1": end_, "y0": index - 0.14, "y1": index + 0.14}
                for end_ in (low, high)
            ]
    return marks


def _build_total_label(row: Bar, widest: float) -> dict[str, object]:
    """Return the bar's bytes for the right margin or, for an empty bar, why it is empty."""
    note = {"yref": "y", "y": row.key, "showarrow": False}
    if not row.components:
        capacity = row.capacity_bytes / GIB
        # Beyond the capacity mark if that would cross the text: the right margin of an empty row is free.
        is_beyond = capacity < NOTE_SHARE * widest
        return {
            **note,
            "x": capacity if is_beyond else 0,
            "xshift": 6 if is_beyond else 0,
            "xref": "x",
            "xanchor": "left",
            "text": row.note,
            "font": SMALL,
            "opacity": 0.75,
        }
    text = f"<b>{format_gib(row.total)} GiB</b>"
    hint = "" if row.band is None else f"likely {format_gib(row.band[0])} to {format_gib(row.band[1])} GiB"
    return {
        **note,
        "x": 1,
        "xref": "paper",
        "xanchor": "right",
        "xshift": RIGHT_PIXELS - 6,
        "text": text,
        "hovertext": hint,
        "font": {"size": 13},
    }


def _build_capacity_label(rows: list[Bar], widest: float) -> dict[str, object]:
    """Return the label of the GPU's capacity mark, below all rows so that no bar crosses it."""
    capacity = rows[0].capacity_bytes / GIB
    where = "" if all(row.is_on_gpu for row in rows) else " on each GPU"
    is_left = capacity < 0.5 * widest
    return {
        "x": capacity, "xref": "x", "xanchor": "left" if is_left else "right", "xshift": -2 if is_left else 2,
        "y": len(rows) - 0.5, "yref": "y", "yanchor": "top", "yshift": 1, "showarrow": False, "font": SMALL,
        "text": f"{format_gib(capacity * GIB)} GiB usable{where}", "opacity": 0.75,
    }  # fmt: skip


# The timeline of one step


class _Timeline(NamedTuple):
    """Line over the areas: the memory of another tier or of a pinned plan."""

    name: str
    """One of :data:`TIMELINES`."""
    label: str
    title: str
    report: MemoryReport


def _list_overlays(shown: ShownMemory) -> list[_Timeline]:
    tiers = [_Timeline(tier, tier, tier, shown.reports[tier]) for tier in TIMELINES if tier in shown.reports]
    pins = [
        _Timeline(f"pin {index}", pin.name.short, f"pinned: {pin.name.full}", pin.report)
        # Each line has a dash pattern of its own, and there are six.
        for index, pin in enumerate(shown.pins[:MAX_PIN_TIMELINES])
    ]
    return [*tiers, *pins]


def _read_timeline(report: MemoryReport) -> tuple[list[float], list[Mapping[str, int]]]:
    """Return fractions of a step and the components at each; a step ends as it began."""
    # Initialization happens once, before the first step.
    phases = [m for m in report.worst_stage.phases if m.phase != "initialisation"]
    if not phases:
        return [], []
    rest = next((m for m in phases if m.phase == "rest"), phases[0])
    return [*(m.fraction for m in phases), 1.0], [*(m.components for m in phases), rest.components]


def _sum_components(report: MemoryReport) -> list[float]:
    return [sum(components.values()) / GIB for components in _read_timeline(report)[1]]


def _build_areas(report: MemoryReport) -> list[dict[str, object]]:
    """Return the prediction's components over one step."""
    times, components_by_time = _read_timeline(report)
    return [
        {"visible": True, "x": times, "y": [components[name] / GIB for components in components_by_time]}
        for name in COMPONENTS
    ]


def _build_lines(timelines: Sequence[_Timeline]) -> list[dict[str, object]]:
    lines = []
    by_name = {timeline.name: timeline for timeline in timelines}
    for name in TIMELINES:
        timeline = by_name.get(name)
        if timeline is None:
            lines.append({"visible": False, "x": [], "y": [], "customdata": []})
        else:
            heights = _sum_components(timeline.report)
            titles = [escape(timeline.title)] * len(heights)
            times = _read_timeline(timeline.report)[0]
            lines.append({"visible": True, "x": times, "y": heights, "customdata": titles})
    return lines


def _build_timeline_layout(
    shown: ShownMemory, overlays: Sequence[_Timeline], inner_pixels: int
) -> dict[str, object]:
    report = shown.report
    capacity = report.usable_bytes / GIB
    highest = max(
        capacity,
        *_sum_components(report),
        *(max(_sum_components(overlay.report), default=0) for overlay in overlays),
    )
    # Room for the peak's label above the highest line.
    top = highest * inner_pixels / (inner_pixels - 18)
    pixels = inner_pixels / top
    labels = [(capacity, f"{format_gib(capacity * GIB)} GiB usable", "")]
    for overlay in overlays:
        text = wrap_label(overlay.label, sign=DASH_SIGNS[TIMELINES.index(overlay.name)])
        labels.append((max(_sum_components(overlay.report), default=0), text, overlay.title))
    return {
        "yaxis2.range": [0, top],
        "shapes": [_build_capacity_line(capacity), *_build_phase_lines()],
        "annotations": [_build_peak_label(report, pixels), *_place_margin_labels(labels, pixels, top)],
    }


def _place_margin_labels(
    labels: Sequence[tuple[float, str, str]], pixels: float, top: float
) -> list[dict[str, object]]:
    """Return labels for the right margin at their heights in GiB, moved apart where they would overlap."""
    placed = []
    ceiling = top * pixels
    for height, text, hint in sorted(labels, reverse=True):
        half = (1 + text.count("<br>")) * TIMELINE_LABEL_PIXELS / 2
        at = min(height * pixels, ceiling - half)
        ceiling = at - half
        placed.append({
            "x": 1, "xref": "paper", "xanchor": "left", "xshift": 4, "y": at / pixels, "yref": "y2",
            "text": text, "hovertext": hint, "showarrow": False, "font": SMALL, "align": "left",
        })  # fmt: skip
    return placed


def _build_peak_label(report: MemoryReport, pixels: float) -> dict[str, object]:
    """Return the label at the peak, placed above the capacity line if it would overlap that."""
    peak = report.worst_stage.peak
    height, capacity = peak.total / GIB, report.usable_bytes / GIB
    gap = (capacity - height) * pixels
    shift = gap + 1 if 0 <= gap < 18 else 1
    is_late = peak.fraction > 0.7
    return {
        "x": peak.fraction, "xref": "x2", "xanchor": "right" if is_late else "left",
        "xshift": -4 if is_late else 4, "y": height, "yref": "y2", "yanchor": "bottom", "yshift": shift,
        "text": f"peak {format_gib(peak.total)} GiB", "showarrow": False, "font": SMALL,
    }  # fmt: skip


def _build_capacity_line(capacity: float) -> dict[str, object]:
    line = {"width": 1, "color": INK, "dash": "dot"}
    return {
        "type": "line", "xref": "x2 domain", "yref": "y2", "x0": 0, "x1": 1, "y0": capacity, "y1": capacity,
        "line": line,
    }  # fmt: skip


def _build_phase_lines() -> list[dict[str, object]]:
    line = {"width": 1, "color": INK}
    return [
        {
            "type": "line", "xref": "x2", "yref": "y2 domain", "x0": start, "x1": start, "y0": 0, "y1": 1,
            "line": line, "opacity": 0.35,
        }
        for _, start in PHASES
    ]  # fmt: skip
