"""The chart of the time view: parts of a step, overlapped time, measured runs, and pinned plans."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from textwrap import wrap

import plotly.graph_objects as go

from shardscope.core.number_format import Scale
from shardscope.timing.report import PARTS, Part, StepReport
from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.kit.pins import wrap_label
from shardscope_widgets.kit.theme import FONT, MEASURED_COLOUR, PART_COLOURS, PART_PATTERNS
from shardscope_widgets.time.rows import ShownStep

ROWS = ("predicted", "overlapped", "measured")
ROW_PIXELS, TOP_PIXELS, BOTTOM_PIXELS = 32, 2, 4
LEFT_PIXELS, RIGHT_PIXELS = 96, 112
TOOLTIP_CHARACTERS = 52
"""Longest line of a tooltip: the chart of a narrow tab has 370 pixels, and a longer one is cut."""
TOOLTIP_LINES = 5
"""Most lines of a tooltip: plotly omits one that is higher than the chart (6 lines are 110 of 102 pixels)."""
OVERLAPPED_OPACITY = 0.55
SMALL = {"size": 12}


def create_step_figure(on_part: Callable[[str], None]) -> Chart:
    """Return the chart with all traces and axes but no data; :func:`draw_step` fills it repeatedly.

    ``on_part`` receives the name of the part whose bar was clicked.
    """
    # All traces exist from the start: drawing only fills them, in one update.
    bars = [
        go.Bar(
            name=name.replace("_", " "),
            orientation="h",
            marker={
                "color": PART_COLOURS[name],
                "line": {"width": 0},
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
    figure = Chart([*bars, measured], layout=_build_layout())
    figure.label = "Time of a step by part. The tables below have the numbers."
    figure._config = {"displayModeBar": False, "responsive": True}

    def report_click(trace: int, point: int, customdata: object) -> None:
        # The last trace, the measured total, has no row in the table.
        if trace < len(PARTS):
            on_part(PARTS[trace])

    figure.on_click(report_click)
    return figure


def _build_layout() -> dict[str, object]:
    return {
        "barmode": "stack",
        "bargap": 0.2,
        "autosize": True,
        "height": ROW_PIXELS * len(ROWS) + TOP_PIXELS + BOTTOM_PIXELS,
        "margin": {"l": LEFT_PIXELS, "r": RIGHT_PIXELS, "t": TOP_PIXELS, "b": BOTTOM_PIXELS},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "font": FONT,
        "hovermode": "closest",
        "hoverlabel": {"align": "left"},
        # Totals are in the right margin: an axis would only add clutter.
        "xaxis": {"visible": False, "fixedrange": True},
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
    }


def draw_step(figure: Chart, shown: ShownStep) -> None:
    """Show a plan's step in ``figure``, in one update."""
    scale, report, measured = shown.scale, shown.report, shown.measured
    pinned = [(f"pin {index}", pin) for index, pin in enumerate(shown.pins)]
    bars = [_build_part_bars(shown, name) for name in PARTS]
    bars.append(
        {
            "y": ["measured"] if measured else [],
            "x": [measured.seconds * scale.factor] if measured else [],
            "customdata": [_write_measured_tooltip(shown)] if measured else [],
        }
    )
    # The axis covers the overlapped row too, although its seconds are not part of the step.
    lengths = [
        *([report.seconds, sum(report.hidden.values())] if report else []),
        *([measured.seconds] if measured else []),
        *(pin.step.report.seconds for _, pin in pinned if pin.step.report),
    ]
    # Keys are the axis' categories and labels its tick texts: plotly merges equal categories, and two pins
    # may have one label.
    keys = [*ROWS, *(key for key, _ in pinned)]
    labels = [*ROWS, *(wrap_label(pin.name.short) for _, pin in pinned)]
    figure.redraw(
        bars,
        {
            "height": ROW_PIXELS * len(keys) + TOP_PIXELS + BOTTOM_PIXELS,
            "xaxis.range": [0, 1.01 * max(lengths, default=0.0) * scale.factor or 1.0],
            "yaxis.range": [len(keys) - 0.5, -0.5],
            "yaxis.categoryorder": "array",
            "yaxis.categoryarray": keys,
            "yaxis.tickvals": keys,
            "yaxis.ticktext": labels,
            "annotations": _build_notes(shown),
        },
    )


def _build_part_bars(shown: ShownStep, name: Part) -> dict[str, object]:
    """Return one part of the predicted row, of the overlapped row, and of every pinned plan's row."""
    scale = shown.scale
    bars: list[tuple[str, float, str, float]] = []
    if shown.report is not None:
        tooltip = _write_part_tooltip(shown.report, name, scale)
        bars.append(("predicted", shown.report.parts[name], tooltip, 1.0))
        bars.append(("overlapped", shown.report.hidden[name], tooltip, OVERLAPPED_OPACITY))
    for index, pin in enumerate(shown.pins):
        if pin.step.report is not None:
            tooltip = f"<b>{escape(pin.name.full)}</b><br>{_write_part_tooltip(pin.step.report, name, scale)}"
            bars.append((f"pin {index}", pin.step.report.parts[name], tooltip, 1.0))
    return {
        "y": [key for key, *_ in bars],
        "x": [seconds * scale.factor for _, seconds, *_ in bars],
        "customdata": [tooltip for *_, tooltip, _ in bars],
        # One trace has a part's bars of all rows; only the overlapped one is pale.
        "marker.opacity": [opacity for *_, opacity in bars],
    }


def _write_part_tooltip(report: StepReport, name: Part, scale: Scale) -> str:
    # explain() begins with the part's Python name.
    text = report.explain(name, scale)
    # plotly's tooltips do not wrap; a word such as all-gather stays in one piece. The row has the whole text.
    lines = wrap(
        escape(text), TOOLTIP_CHARACTERS, break_on_hyphens=False, max_lines=TOOLTIP_LINES, placeholder=" …"
    )
    return "<br>".join(lines)


def _build_notes(shown: ShownStep) -> list[dict[str, object]]:
    """Return each row's total for the right margin or, for an empty row, why it is empty."""
    report, measured = shown.report, shown.measured
    overlapped = sum(report.hidden.values()) if report else 0.0
    rows = [
        ("predicted", report.seconds if report else 0.0, "no prediction: see below"),
        ("overlapped", overlapped, "no communication overlaps with compute" if report else ""),
        ("measured", measured.seconds if measured else 0.0, "not measured yet"),
    ]
    for index, pin in enumerate(shown.pins):
        seconds = pin.step.report.seconds if pin.step.report else 0.0
        rows.append((f"pin {index}", seconds, "no prediction"))
    notes = []
    for key, seconds, why in rows:
        place = {"y": key, "yref": "y", "showarrow": False}
        if not seconds:
            empty = {"x": 0, "xref": "x", "xanchor": "left", "text": why, "font": SMALL, "opacity": 0.75}
            notes.append({**place, **empty})
            continue
        text = _format_total(shown.scale, seconds, is_part=key == "overlapped")
        # Only a predicted step has something to deviate from.
        if report and key == "measured":
            text += f" {_format_deviation(seconds, report.seconds)}"
        right = {"x": 1, "xref": "paper", "xanchor": "right", "xshift": RIGHT_PIXELS - 6, "text": text}
        notes.append({**place, **right, "font": {"size": 13}})
    return notes


def _format_total(scale: Scale, seconds: float, is_part: bool) -> str:
    text = scale.format_with_unit(seconds)
    return text if is_part else f"<b>{text}</b>"


def _format_deviation(measured: float, predicted: float) -> str:
    """Return the deviation of the measured step from the predicted one: ``+6 %``."""
    # A minus sign is as wide as a plus sign; the hyphen of Python's format is not.
    return f"{100 * (measured / predicted - 1):+.0f} %".replace("-", "−")


def _write_measured_tooltip(shown: ShownStep) -> str:
    measured = shown.measured
    if measured is None:
        return ""
    show = shown.scale.format_with_unit
    tooltip = f"measured: {show(measured.seconds)}, the median of {measured.num_steps:,} steps"
    return tooltip + (f"<br>predicted: {show(shown.report.seconds)}" if shown.report else "")
