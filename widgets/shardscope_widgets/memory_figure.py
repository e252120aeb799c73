"""The one figure of the memory view: bars at the peak above, the worst rank's course over one step below."""

from __future__ import annotations

from html import escape
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go

from shardscope.memory.report import COMPONENTS, MemoryReport, StageMemory
from shardscope.memory.words import gib
from shardscope_widgets.figures import survive_reload
from shardscope_widgets.theme import COMPONENT_COLOURS

GIB = 2**30
MAX_BARS = 16
BAR_PIXELS, AXIS_PIXELS, TOP_PIXELS = 30, 50, 8
COURSE_PIXELS, BOTTOM_PIXELS = 118, 22
PHASES = (("forward", 0.0), ("backward", 0.34), ("optimizer", 0.98))
INK = "#66707a"


def empty_figure() -> go.FigureWidget:
    """All traces and axes, without data; made once, redrawn by :func:`draw`."""
    bars = [
        go.Bar(
            name=name.replace("_", " "),
            orientation="h",
            marker={"color": COMPONENT_COLOURS[name], "line": {"width": 0}},
            hovertemplate="%{customdata}<extra></extra>",
        )
        for name in COMPONENTS
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
    figure = go.FigureWidget(
        [*bars, *areas],
        layout={
            "barmode": "stack",
            "bargap": 0.3,
            "autosize": True,
            "margin": {"l": 78, "r": 116, "t": TOP_PIXELS, "b": BOTTOM_PIXELS},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "showlegend": False,
            "hoverlabel": {"align": "left"},
            "xaxis": {
                "ticksuffix": " GiB",
                "zeroline": False,
                "fixedrange": True,
                "nticks": 7,
                "anchor": "y",
            },
            "yaxis": {"fixedrange": True, "showgrid": False, "zeroline": False, "type": "category"},
            "xaxis2": {
                "fixedrange": True,
                "showgrid": False,
                "zeroline": False,
                "range": [0, 1.0],
                "tickvals": [0.17, 0.66, 0.99],
                "ticktext": ["forward", "backward", "optimizer"],
                "anchor": "y2",
            },
            "yaxis2": {"fixedrange": True, "zeroline": False, "nticks": 4, "ticksuffix": " GiB"},
            # A redraw that moves would say that something happened which did not.
            "transition": {"duration": 0},
        },
    )
    figure._config = {"displayModeBar": False, "responsive": True}
    return survive_reload(figure)


def draw(figure: go.FigureWidget, report: MemoryReport) -> None:
    """Show ``report``: one update, in place."""
    stages = shown_stages(report)
    labels = ["predicted"] if len(report.by_stage) == 1 else [f"stage {stage.stage}" for stage in stages]
    capacity = report.usable_bytes / GIB
    fullest = max(stage.peak_bytes for stage in stages) / GIB
    upper = BAR_PIXELS * len(labels)
    inner = upper + AXIS_PIXELS + COURSE_PIXELS
    with figure.batch_update():
        for bar, name in zip(figure.data[: len(COMPONENTS)], COMPONENTS, strict=True):
            bar.y = labels
            bar.x = [stage.components[name] / GIB for stage in stages]
            bar.customdata = [_hover(stage, name) for stage in stages]
        times, course = _course(report)
        for area, name in zip(figure.data[len(COMPONENTS) :], COMPONENTS, strict=True):
            area.x = times
            area.y = [components[name] / GIB for components in course]
        layout = figure.layout
        layout.height = inner + TOP_PIXELS + BOTTOM_PIXELS
        layout.yaxis.domain = [1 - upper / inner, 1]
        layout.yaxis2.domain = [0, COURSE_PIXELS / inner]
        layout.xaxis.range = [0, max(fullest * 1.02, capacity * 1.03)]
        layout.yaxis.range = [len(labels) - 0.5, -0.5]
        layout.yaxis2.range = [0, max(fullest, capacity) * 1.08]
        layout.shapes = [*_capacity_lines(capacity), *_phase_lines()]
        layout.annotations = [
            *(_total(label, stage) for label, stage in zip(labels, stages, strict=True)),
            _course_note(capacity),
            _peak_note(report),
        ]


def shown_stages(report: MemoryReport) -> list[StageMemory]:
    """All stages; of many, evenly chosen ones, the first, the last and the worst among them."""
    stages = list(report.by_stage)
    if len(stages) <= MAX_BARS:
        return stages
    step = (len(stages) - 1) / (MAX_BARS - 1)
    chosen = {round(index * step) for index in range(MAX_BARS)} | {report.worst_stage.stage}
    return [stages[index] for index in sorted(chosen)]


def _course(report: MemoryReport) -> tuple[list[float], list[Any]]:
    """Fractions of a step and components at each; a step ends as it began."""
    moments = [m for m in report.worst_stage.moments if m.phase != "initialisation"]
    rest = next(m for m in moments if m.phase == "rest")
    return [*(m.fraction for m in moments), 1.0], [*(m.components for m in moments), rest.components]


def _hover(stage: StageMemory, name: str) -> str:
    term = stage.peak.terms.get(name)  # type: ignore[call-overload]
    if term is None:
        return ""
    lines = wrap(escape(term.explain()), 72)
    return "<br>".join([f"<b>{name.replace('_', ' ')}: {gib(term.num_bytes)} GiB</b>", *lines])


def _capacity_lines(capacity: float) -> list[dict[str, Any]]:
    line = {"type": "line", "line": {"width": 2, "color": INK}}
    dashed = {"type": "line", "line": {"width": 1, "color": INK, "dash": "dot"}}
    return [
        {**line, "xref": "x", "yref": "y domain", "x0": capacity, "x1": capacity, "y0": -0.06, "y1": 1.06},
        {**dashed, "xref": "x2 domain", "yref": "y2", "x0": 0, "x1": 1, "y0": capacity, "y1": capacity},
    ]


def _phase_lines() -> list[dict[str, Any]]:
    return [
        {
            "type": "line",
            "xref": "x2",
            "yref": "y2 domain",
            "x0": start,
            "x1": start,
            "y0": 0,
            "y1": 1,
            "line": {"width": 1, "color": INK},
            "opacity": 0.35,
        }
        for _, start in PHASES
    ]


def _total(label: str, stage: StageMemory) -> dict[str, Any]:
    text = f"<b>{gib(stage.peak_bytes)}</b> GiB"
    return {
        "x": 1,
        "xref": "paper",
        "xanchor": "left",
        "xshift": 8,
        "y": label,
        "yref": "y",
        "text": text,
        "showarrow": False,
        "font": {"size": 13},
    }


def _course_note(capacity: float) -> dict[str, Any]:
    return {
        "x": 1,
        "xref": "paper",
        "xanchor": "left",
        "xshift": 8,
        "y": capacity,
        "yref": "y2",
        "text": f"{gib(capacity * GIB)} GiB usable",
        "showarrow": False,
        "font": {"size": 12},
    }


def _peak_note(report: MemoryReport) -> dict[str, Any]:
    peak = report.worst_stage.peak
    late = peak.fraction > 0.7
    return {
        "x": peak.fraction,
        "xref": "x2",
        "xanchor": "right" if late else "left",
        "xshift": -6 if late else 6,
        "y": peak.total / GIB,
        "yref": "y2",
        "yanchor": "bottom",
        "text": f"peak {gib(peak.total)}",
        "showarrow": False,
        "font": {"size": 12},
    }
