"""The one figure of the step view: what a step waits for, what is hidden beneath it, what runs measured."""

from __future__ import annotations

from html import escape
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go

from shardscope.timing.report import PARTS, StepReport, seconds_words
from shardscope_widgets.kit.chart import Chart, survive_reload
from shardscope_widgets.kit.numbers import Scale
from shardscope_widgets.kit.theme import MEASURED_COLOUR, PART_COLOURS, PART_PATTERNS
from shardscope_widgets.time.rows import ShownStep

ROWS = ("predicted", "hidden", "measured")
ROW_PIXELS, TOP_PIXELS, BOTTOM_PIXELS = 40, 8, 24
HIDDEN_OPACITY = 0.55
INK = "#7f8790"


def empty_figure() -> Chart:
    """All traces and axes, without data; made once, redrawn by :func:`draw`."""
    bars = [
        go.Bar(
            name=name.replace("_", " "),
            orientation="h",
            marker={
                "color": PART_COLOURS[name],
                "line": {"width": 0},
                "opacity": [1.0, HIDDEN_OPACITY],
                "pattern": {
                    "shape": PART_PATTERNS.get(name, ""),
                    "size": 6,
                    "solidity": 0.3,
                    "fillmode": "overlay",
                    "fgcolor": "rgba(255,255,255,0.75)",
                },
            },
            hovertemplate="%{customdata}<extra></extra>",
        )
        for name in PARTS
    ]
    measured = go.Bar(
        name="measured",
        orientation="h",
        marker={"color": MEASURED_COLOUR, "line": {"width": 0}},
        hovertemplate="%{customdata}<extra></extra>",
    )
    figure = Chart([*bars, measured], layout=_layout())
    figure._config = {"displayModeBar": False, "responsive": True}
    return survive_reload(figure)


def _layout() -> dict[str, Any]:
    return {
        "barmode": "stack",
        "bargap": 0.34,
        "autosize": True,
        "height": ROW_PIXELS * len(ROWS) + TOP_PIXELS + BOTTOM_PIXELS,
        "margin": {"l": 84, "r": 116, "t": TOP_PIXELS, "b": BOTTOM_PIXELS},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hoverlabel": {"align": "left"},
        "xaxis": {
            "zeroline": False,
            "fixedrange": True,
            "tickformat": ",~r",
            "showticksuffix": "last",
            "nticks": 4,
            "tickangle": 0,
        },
        "yaxis": {
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "type": "category",
            "categoryorder": "array",
            "categoryarray": list(ROWS),
            "range": [len(ROWS) - 0.5, -0.5],
            "ticks": "outside",
            "ticklen": 6,
            "tickcolor": "rgba(0,0,0,0)",
        },
        "transition": {"duration": 0},
    }


def draw(figure: Chart, shown: ShownStep) -> None:
    """Show it: one update, in place."""
    scale, report, measured = shown.scale, shown.report, shown.measured
    bars: list[dict[str, Any]] = [
        {"y": [], "x": [], "customdata": []} if report is None else _bar(report, name, scale)
        for name in PARTS
    ]
    bars.append(
        {
            "y": ["measured"] if measured else [],
            "x": [measured.seconds * scale.factor] if measured else [],
            "customdata": [_measured_words(shown)] if measured else [],
        }
    )
    longest = max(
        report.seconds if report else 0.0,
        sum(report.hidden.values()) if report else 0.0,
        measured.seconds if measured else 0.0,
    )
    figure.redraw(
        bars,
        {
            "xaxis.range": [0, 1.02 * longest * scale.factor or 1.0],
            "xaxis.ticksuffix": f" {scale.unit}",
            # An axis without a bar would show numbers that mean nothing.
            "xaxis.visible": longest > 0,
            "annotations": _notes(shown),
        },
    )


def _bar(report: StepReport, name: Any, scale: Scale) -> dict[str, Any]:
    """One part of the predicted row and, as far as arithmetic covers it, of the hidden one."""
    spoken = name.replace("_", " ") + report.explain(name).removeprefix(name)
    words = "<br>".join(wrap(escape(spoken), 72, break_on_hyphens=False))
    return {
        "y": ["predicted", "hidden"],
        "x": [report.parts[name] * scale.factor, report.hidden[name] * scale.factor],
        "customdata": [words, words],
    }


def _notes(shown: ShownStep) -> list[dict[str, Any]]:
    """Each row's sum at the right edge; in the place of an empty row, why it is."""
    report, measured = shown.report, shown.measured
    hidden = sum(report.hidden.values()) if report else 0.0
    notes = []
    for row, seconds, why in (
        ("predicted", report.seconds if report else 0.0, "not known: the words below say why"),
        ("hidden", hidden, "nothing is sent beneath arithmetic" if report else ""),
        ("measured", measured.seconds if measured else 0.0, "no run of this plan yet"),
    ):
        place = {"y": row, "showarrow": False, "xanchor": "left"}
        if not seconds:
            notes.append(
                {**place, "x": 0, "xref": "x", "xshift": 6, "text": why, "font": {"size": 12}, "opacity": 0.7}
            )
            continue
        text = f"{shown.scale.show(seconds)} {shown.scale.unit}"
        text = text if row == "hidden" else f"<b>{text.partition(' ')[0]}</b> {shown.scale.unit}"
        if row == "measured" and report:
            text += f" {_beside(seconds, report.seconds)}"
        notes.append({**place, "x": 1, "xref": "paper", "xshift": 8, "text": text, "font": {"size": 13}})
    return notes


def _beside(measured: float, predicted: float) -> str:
    """What was measured beside what was predicted: ``+6 %``."""
    return f"{100 * (measured / predicted - 1):+.0f} %".replace("-", "−")


def _measured_words(shown: ShownStep) -> str:
    measured = shown.measured
    if measured is None:
        return ""
    words = f"measured: {seconds_words(measured.seconds)}, the median of {measured.num_steps:,} steps"
    return words + (f"<br>predicted: {seconds_words(shown.report.seconds)}" if shown.report else "")
