"""The one figure of the memory view: bars at the peak, or the course of one step, on the same place."""

from __future__ import annotations

from typing import Any, Literal

import plotly.graph_objects as go

from shardscope.memory.report import COMPONENTS, MemoryReport
from shardscope.memory.words import gib
from shardscope_widgets.figures import Chart, survive_reload
from shardscope_widgets.memory_rows import Bar, Shown, bars_of
from shardscope_widgets.theme import BESIDE_COLOURS, COMPONENT_COLOURS

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
        "xaxis": {"ticksuffix": " GiB", "zeroline": False, "fixedrange": True, "nticks": 7, "anchor": "y"},
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
    filled = [row for row in rows if row.components]
    labels = [row.label for row in rows]
    inner = max(LEAST_PIXELS, BAR_PIXELS * len(rows))
    with figure.batch_update():
        for bar, name in zip(figure.data[: len(NAMES)], NAMES, strict=True):
            bar.y = [row.label for row in filled]
            bar.x = [row.components.get(name, 0) / GIB for row in filled]
            bar.customdata = [row.explain(name) for row in filled]
            bar.visible = mode == "peak"
        others = _draw_courses(figure, shown, mode)
        layout = figure.layout
        layout.height = inner + TOP_PIXELS + BOTTOM_PIXELS
        layout.xaxis.visible = layout.yaxis.visible = mode == "peak"
        layout.xaxis2.visible = layout.yaxis2.visible = mode == "step"
        layout.yaxis.categoryorder = "array"
        layout.yaxis.categoryarray = labels
        layout.yaxis.range = [len(labels) - 0.5, -0.5]
        layout.xaxis.range = [0, _widest(rows)]
        if mode == "peak":
            layout.shapes = _marks(rows)
            layout.annotations = [_total(index, row) for index, row in enumerate(rows)]
        else:
            capacity = shown.report.usable_bytes / GIB
            layout.shapes = [_capacity_across(capacity), *_phase_lines()]
            notes = _line_notes([name for name in OTHER_COURSES if name in others])
            layout.annotations = [_course_note(capacity), _peak_note(shown.report), *notes]


def _widest(rows: list[Bar]) -> float:
    """The end of the axis: every bar, band and capacity is on it."""
    ends = [max(row.total * 1.02, row.band[1] * 1.01 if row.band else 0) for row in rows]
    capacities = [row.capacity_bytes * 1.03 for row in rows if row.label not in ("host", "NVMe")]
    shares = [min(row.capacity_bytes * 1.03, max(ends)) for row in rows if row.label in ("host", "NVMe")]
    return max((*ends, *capacities, *shares)) / GIB


def _draw_courses(figure: Chart, shown: Shown, mode: Mode) -> set[str]:
    """Areas of the prediction, and lines of whatever else there is; gives the names of these lines."""
    times, course = _course(shown.report)
    first = len(NAMES)
    for area, name in zip(figure.data[first : first + len(COMPONENTS)], COMPONENTS, strict=True):
        area.x = times
        area.y = [components[name] / GIB for components in course]
        area.visible = mode == "step"
    others = {**shown.reports, **({"A": shown.kept.memory()} if shown.kept else {})}
    fullest = [max(sum(components.values()) for components in course) / GIB]
    for line, name in zip(figure.data[first + len(COMPONENTS) :], OTHER_COURSES, strict=True):
        report = others.get(name)
        line.visible = mode == "step" and report is not None
        times, parts = _course(report) if report is not None else ([], [])
        heights = [sum(components.values()) / GIB for components in parts]
        # Once each: during an update plotly compares with what stood before it, and reads back just that.
        line.x, line.y = times, heights
        fullest.append(max(heights, default=0))
    figure.layout.yaxis2.range = [0, max(*fullest, shown.report.usable_bytes / GIB) * 1.12]
    return others.keys() & set(OTHER_COURSES)


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


def _line_notes(names: list[str]) -> list[dict[str, Any]]:
    """What each kind of line is, from the bottom of the right edge upwards."""
    signs = dict(zip(OTHER_COURSES, ("– –", "· · ·", "– ·"), strict=True))
    place = {"x": 1, "xref": "paper", "xanchor": "left", "xshift": 8, "y": 0, "yref": "y2"}
    look = {"yanchor": "bottom", "showarrow": False, "font": {"size": 12}}
    return [
        {**place, **look, "yshift": 16 * row, "text": f"{signs[name]} {name}"}
        for row, name in enumerate(reversed(names))
    ]


def _peak_note(report: MemoryReport) -> dict[str, Any]:
    peak = report.worst_stage.peak
    late = peak.fraction > 0.7
    return {
        "x": peak.fraction, "xref": "x2", "xanchor": "right" if late else "left", "xshift": -6 if late else 6,
        "y": peak.total / GIB, "yref": "y2", "yanchor": "bottom", "text": f"peak {gib(peak.total)}",
        "showarrow": False, "font": {"size": 12},
    }  # fmt: skip
