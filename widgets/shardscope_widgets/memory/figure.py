"""The one figure of the memory view: bars at the peak, or the course of one step, on the same place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import plotly.graph_objects as go

from shardscope.memory.report import COMPONENTS, MemoryReport
from shardscope.memory.words import gib
from shardscope_widgets.kit.chart import Chart, survive_reload
from shardscope_widgets.kit.theme import BESIDE_COLOURS, COMPONENT_COLOURS
from shardscope_widgets.memory.rows import TIERS, Bar, Shown, bars_of, whose

GIB = 2**30
Mode = Literal["peak", "step"]
BAR_PIXELS, TOP_PIXELS, BOTTOM_PIXELS = 30, 8, 24
LEAST_PIXELS = 132
"""Height of bars and of the course alike, so that nothing below them moves."""
COURSE_EDGE = 0.98
PHASES = (("forward", 0.0), ("backward", 0.34), ("optimizer", COURSE_EDGE))
INK = "#7f8790"
NAMES = (*COMPONENTS, *BESIDE_COLOURS)
OTHER_COURSES = ("rehearsed", "measured", "A")
DASHES = ("dash", "dot", "dashdot")


def empty_figure() -> Chart:
    """All traces and axes, without data; made once, redrawn by :func:`draw`."""
    bars = [
        go.Bar(
            name=name.replace("_", " "),
            orientation="h",
            marker={
                "color": {**COMPONENT_COLOURS, **BESIDE_COLOURS}[name],
                "line": {"width": 0},
                "pattern": {"shape": "/" if name in BESIDE_COLOURS else "", "size": 5, "solidity": 0.25},
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
            hovertemplate=f"{name.replace('_', ' ')} %{{y:.3g}} GiB<extra></extra>",
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
            hovertemplate=f"{name} %{{y:.3g}} GiB<extra></extra>",
        )
        for name, dash in zip(OTHER_COURSES, DASHES, strict=True)
    ]
    figure = Chart([*bars, *areas, *lines], layout=_layout())
    figure._config = {"displayModeBar": False, "responsive": True}
    return survive_reload(figure)


def _layout() -> dict[str, Any]:
    return {
        "barmode": "stack",
        "bargap": 0.3,
        "autosize": True,
        "margin": {"l": 84, "r": 116, "t": TOP_PIXELS, "b": BOTTOM_PIXELS},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hoverlabel": {"align": "left"},
        "xaxis": {
            "ticksuffix": " GiB",
            "showticksuffix": "last",
            "zeroline": False,
            "fixedrange": True,
            "nticks": 7,
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
        },
        "xaxis2": {
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "range": [0, 1.0],
            "tickvals": [0.17, 0.66, 0.99],
            "ticktext": ["forward", "backward", "optimizer"],
            "anchor": "y2",
        },
        "yaxis2": {"fixedrange": True, "zeroline": False, "nticks": 5, "ticksuffix": " GiB"},
        # A redraw that moves would say that something happened which did not.
        "transition": {"duration": 0},
    }


def draw(figure: Chart, shown: Shown, mode: Mode = "peak") -> None:
    """Show it: one update, in place."""
    rows = bars_of(shown)
    at_peak = mode == "peak"
    layout: dict[str, Any] = {
        # Of bars and course alike: nothing below them moves.
        "height": max(LEAST_PIXELS, BAR_PIXELS * len(rows)) + TOP_PIXELS + BOTTOM_PIXELS,
        "xaxis.visible": at_peak,
        "yaxis.visible": at_peak,
        "xaxis2.visible": not at_peak,
        "yaxis2.visible": not at_peak,
    }
    # What is out of sight is not filled: half of a redraw's time otherwise.
    if at_peak:
        courses: list[dict[str, Any]] = [{"visible": False}] * (len(COMPONENTS) + len(OTHER_COURSES))
        figure.redraw([*_bars(rows), *courses], {**layout, **_bars_layout(rows)})
    else:
        others = {**shown.reports, **({"A": shown.kept_reports["predicted"]} if shown.kept else {})}
        lines = _lines(others)
        bars: list[dict[str, Any]] = [{"visible": False}] * len(NAMES)
        courses = [*_areas(shown.report), *lines]
        figure.redraw([*bars, *courses], {**layout, **_course_layout(shown, lines)})


def _bars(rows: list[Bar]) -> list[dict[str, Any]]:
    """Each component's part of every bar that has any."""
    filled = [row for row in rows if row.components]
    return [
        {
            "visible": True,
            "y": [row.label for row in filled],
            "x": [row.components.get(name, 0) / GIB for row in filled],
            "customdata": [row.explain(name) for row in filled],
        }
        for name in NAMES
    ]


def _bars_layout(rows: list[Bar]) -> dict[str, Any]:
    return {
        "xaxis.range": [0, _widest(rows)],
        "yaxis.range": [len(rows) - 0.5, -0.5],
        "yaxis.categoryorder": "array",
        "yaxis.categoryarray": [row.label for row in rows],
        "shapes": _marks(rows),
        "annotations": [_total(index, row) for index, row in enumerate(rows)],
    }


def _widest(rows: list[Bar]) -> float:
    """The end of the axis: every bar, band and capacity is on it."""
    ends = [max(row.total * 1.02, row.band[1] * 1.01 if row.band else 0) for row in rows]
    capacities = [row.capacity_bytes * 1.03 for row in rows if row.label not in ("host", "NVMe")]
    shares = [min(row.capacity_bytes * 1.03, max(ends)) for row in rows if row.label in ("host", "NVMe")]
    return max((*ends, *capacities, *shares)) / GIB


def _areas(report: MemoryReport) -> list[dict[str, Any]]:
    """The prediction's components over one step."""
    times, course = _course(report)
    return [
        {"visible": True, "x": times, "y": [components[name] / GIB for components in course]}
        for name in COMPONENTS
    ]


def _lines(reports: Mapping[str, MemoryReport]) -> list[dict[str, Any]]:
    """A line for whatever else there is of :data:`OTHER_COURSES`."""
    lines = []
    for name in OTHER_COURSES:
        times, parts = _course(reports[name]) if name in reports else ([], [])
        heights = [sum(components.values()) / GIB for components in parts]
        lines.append({"visible": name in reports, "x": times, "y": heights})
    return lines


def _course_layout(shown: Shown, lines: list[dict[str, Any]]) -> dict[str, Any]:
    report = shown.report
    capacity = report.usable_bytes / GIB
    _, course = _course(report)
    predicted = [sum(components.values()) / GIB for components in course]
    highest = max(capacity, *predicted, *(height for line in lines for height in line["y"]))
    names = [name for name, line in zip(OTHER_COURSES, lines, strict=True) if line["visible"]]
    # Of two plans, the tiers beside the areas are those of the areas' own.
    notes = _line_notes({name: whose("B", name) if shown.kept and name in TIERS else name for name in names})
    return {
        "yaxis2.range": [0, highest * 1.12],
        "shapes": [_capacity_across(capacity), *_phase_lines()],
        "annotations": [_course_note(capacity), _peak_note(report), *notes],
    }


def _course(report: MemoryReport) -> tuple[list[float], list[Any]]:
    """Fractions of a step and components at each; a step ends as it began."""
    moments = [m for m in report.worst_stage.moments if m.phase != "initialisation"]
    if not moments:
        return [], []
    rest = next((m for m in moments if m.phase == "rest"), moments[0])
    return [*(m.fraction for m in moments), 1.0], [*(m.components for m in moments), rest.components]


def _marks(rows: list[Bar]) -> list[dict[str, Any]]:
    """At each row its capacity; on the bars that have one, the band from the least to the most."""
    marks = []
    thick = {"type": "line", "xref": "x", "yref": "y", "line": {"width": 2, "color": INK}}
    thin = {**thick, "line": {"width": 1.5, "color": INK}}
    for index, row in enumerate(rows):
        if row.capacity_bytes:
            end = row.capacity_bytes / GIB
            marks.append({**thick, "x0": end, "x1": end, "y0": index - 0.5, "y1": index + 0.5})
        if row.band:
            low, high = (value / GIB for value in row.band)
            marks.append({**thin, "x0": low, "x1": high, "y0": index, "y1": index})
            marks += [
                {**thin, "x0": at, "x1": at, "y0": index - 0.14, "y1": index + 0.14} for at in (low, high)
            ]
    return marks


def _capacity_across(capacity: float) -> dict[str, Any]:
    line = {"width": 1, "color": INK, "dash": "dot"}
    return {
        "type": "line", "xref": "x2 domain", "yref": "y2", "x0": 0, "x1": 1, "y0": capacity, "y1": capacity,
        "line": line,
    }  # fmt: skip


def _phase_lines() -> list[dict[str, Any]]:
    line = {"width": 1, "color": INK}
    return [
        {
            "type": "line", "xref": "x2", "yref": "y2 domain", "x0": start, "x1": start, "y0": 0, "y1": 1,
            "line": line, "opacity": 0.35,
        }
        for _, start in PHASES
    ]  # fmt: skip


def _total(index: int, row: Bar) -> dict[str, Any]:
    """The bar's bytes at the right edge; in the place of an empty bar, why it is."""
    note = {"yref": "y", "y": index, "showarrow": False, "xanchor": "left"}
    if not row.components:
        return {
            **note,
            "x": 0,
            "xref": "x",
            "xshift": 6,
            "text": row.note,
            "font": {"size": 12},
            "opacity": 0.7,
        }
    text = f"<b>{gib(row.total)}</b> GiB"
    return {**note, "x": 1, "xref": "paper", "xshift": 8, "text": text, "font": {"size": 13}}


def _course_note(capacity: float) -> dict[str, Any]:
    return {
        "x": 1, "xref": "paper", "xanchor": "left", "xshift": 8, "y": capacity, "yref": "y2",
        "text": f"{gib(capacity * GIB)} GiB usable", "showarrow": False, "font": {"size": 12},
    }  # fmt: skip


def _line_notes(names: Mapping[str, str]) -> list[dict[str, Any]]:
    """What each kind of line is, from the bottom of the right edge upwards."""
    signs = dict(zip(OTHER_COURSES, ("– –", "· · ·", "– ·"), strict=True))
    place = {"x": 1, "xref": "paper", "xanchor": "left", "xshift": 8, "y": 0, "yref": "y2"}
    look = {"yanchor": "bottom", "showarrow": False, "font": {"size": 12}}
    return [
        {**place, **look, "yshift": 16 * row, "text": f"{signs[name]} {label}"}
        for row, (name, label) in enumerate(reversed(names.items()))
    ]


def _peak_note(report: MemoryReport) -> dict[str, Any]:
    peak = report.worst_stage.peak
    late = peak.fraction > 0.7
    return {
        "x": peak.fraction, "xref": "x2", "xanchor": "right" if late else "left", "xshift": -6 if late else 6,
        "y": peak.total / GIB, "yref": "y2", "yanchor": "bottom", "text": f"peak {gib(peak.total)}",
        "showarrow": False, "font": {"size": 12},
    }  # fmt: skip
