"""Two runs side by side: a table of their numbers, and their loss and speed curves in shared charts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import isfinite, isnan

import ipywidgets as widgets

import shardscope as ss
from shardscope.core.number_format import Scale, format_error
from shardscope.records.folder import RunFolder
from shardscope.records.folder_checks import shorten_message
from shardscope.runs.explain.compare import Comparison, Curve
from shardscope.runs.summaries import summarize
from shardscope.runs.task_fields import has_task_fields
from shardscope.runs.totals import RunTotals, compute_totals
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.kit.numbers import Unit, format_short
from shardscope_widgets.kit.theme import RANK_COLOURS, RANK_DASHES
from shardscope_widgets.kit.view import View
from shardscope_widgets.run.figure import build_predicted_line, name_axis
from shardscope_widgets.run.lines import Line
from shardscope_widgets.run.run_html import format_duration, render_swatch
from shardscope_widgets.run.runs_table import describe_plan, format_loss, format_time, make_printable

NONE = "–"
LOG_FROM_RATIO = 1000.0
"""Ratio above which the loss axis is logarithmic: a diverging run would flatten the other run's curve."""
MAX_VALUE = 1e100
"""Largest value drawn: larger ones would flatten the axis, and their range may overflow a float."""
FEW_POINTS = 10
"""Lines with up to this many points have markers: a line of one point would be invisible."""
DOMAINS = ((0.58, 0.94), (0.0, 0.36))
"""Vertical extents of the two charts, the upper one first, as fractions of the figure."""


class ComparisonView(View):
    """A table and two charts, hidden until :meth:`show` fills them."""

    def __init__(self) -> None:
        self.table = controls.create_html("", "ss-compared")
        self.chart = _create_chart()
        super().__init__([self.table, self.chart], layout=widgets.Layout(display="none"))
        self.add_class("ss-compare")

    def show(self, comparison: Comparison) -> None:
        """Show two runs. Raises ``ValueError`` or ``OSError`` if one of them cannot be read."""
        pace_label, paces = comparison.pace_curves()
        charts = (("loss", comparison.loss_curves()), (pace_label, paces))
        missing = [sentence for label, curves in charts for sentence in _describe_missing(label, curves)]
        self.table.value = _render_table(comparison.runs) + "".join(
            f"<p>{escape(sentence)}</p>" for sentence in (*_describe_settings(comparison), *missing)
        )
        traces: list[dict[str, object]] = []
        annotations: list[dict[str, object]] = []
        shapes: list[dict[str, object]] = []
        layout: dict[str, object] = {"annotations": annotations, "shapes": shapes}
        for number, (label, curves) in enumerate(charts):
            is_log = _needs_log(curves)
            layout[name_axis("yaxis", number)] = {
                **_AXIS,
                "domain": DOMAINS[number],
                "anchor": name_axis("x", number),
                "type": "log" if is_log else "linear",
                # A logarithmic axis has no zero, and on one from zero two losses would look equal.
                "rangemode": "normal" if is_log or number == 0 else "tozero",
            }
            annotations.append(_build_title(label + (", logarithmic" if is_log else ""), number))
            # Equal predictions of both runs are written once.
            predicted = dict.fromkeys(format_short(curve.predicted) for curve in curves if curve.predicted)
            if predicted:
                annotations.append(_build_predicted_label(" and ".join(predicted), number))
            for index, curve in enumerate(curves):
                traces.append(_build_trace(curve, index, number))
                if curve.predicted:
                    style = {"width": 1.5, "dash": "dot", "color": RANK_COLOURS[index]}
                    shapes.append(build_predicted_line(number, curve.predicted, style))
        self.chart.redraw(traces, layout)


def _render_table(runs: Sequence[ss.Run]) -> str:
    """Return the runs' numbers as a table, in the units of the list and of a run's page.

    What no run has has no row. The headings show the lines of the charts.
    """
    columns = [
        {**_describe_run(run), **results}
        for run, results in zip(runs, _describe_all_totals(runs), strict=True)
    ]
    head = "".join(
        f"<th scope='col'>{render_swatch(index)}<span title='{name}'>{name}</span></th>"
        for index, run in enumerate(runs)
        if (name := escape(make_printable(run.name), quote=True))
    )
    labels = dict.fromkeys(label for column in columns for label in column)
    body = "".join(
        f"<tr><th scope='row'>{label}</th>"
        + "".join(f"<td>{escape(column.get(label) or NONE)}</td>" for column in columns)
        + "</tr>"
        for label in labels
        if any(column.get(label) for column in columns)
    )
    return f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table>"


def _describe_run(run: ss.Run) -> dict[str, str]:
    """Return label -> text of a run's state and plan; empty texts are unknown."""
    summary = summarize(run.folder, run)
    duration = summary.seconds
    return {
        "status": summary.status,
        "started": format_time(summary.created),
        "duration": "" if duration is None else format_duration(duration),
        "plan": describe_plan(summary),
    }


def _describe_all_totals(runs: Sequence[ss.Run]) -> list[dict[str, str]]:
    """Return label -> text of each run's results, with times and sizes in units that the runs share."""
    totals: list[RunTotals | Exception] = []
    for run in runs:
        # A file of the run may be damaged although its status can be read.
        try:
            totals.append(compute_totals(run))
        except (ValueError, OSError) as error:
            totals.append(error)
    readable = [one for one in totals if isinstance(one, RunTotals)]
    predicted_seconds = [run.predicted_step_seconds for run in runs]
    scale = Scale.for_column(
        seconds for seconds in (*predicted_seconds, *(one.step_seconds for one in readable)) if seconds
    )
    unit = Unit.for_column(
        size for one in readable for size in (one.tensor_bytes, one.predicted_tensor_bytes) if size
    )
    return [
        _describe_totals(one, predicted, scale, unit)
        if isinstance(one, RunTotals)
        else {"status": "damaged", "plan": shorten_message(RunFolder(run.folder), one)}
        for run, one, predicted in zip(runs, totals, predicted_seconds, strict=True)
    ]


def _describe_totals(totals: RunTotals, predicted: float | None, scale: Scale, unit: Unit) -> dict[str, str]:
    measured = totals.step_seconds

    def format_bytes(num_bytes: int | None) -> str:
        return f"{unit.format(num_bytes)} {unit.name}" if num_bytes else ""

    return {
        "steps": "" if totals.num_steps is None else f"{totals.num_steps:,}",
        "last loss": "" if totals.loss is None else format_loss(totals.loss),
        "step time": scale.format_with_unit(measured) if measured else "",
        "predicted time": scale.format_with_unit(predicted) if predicted else "",
        # Positive if the prediction was too high, as everywhere.
        "error of time": format_error(predicted / measured - 1) if predicted and measured else "",
        "tensors at peak": format_bytes(totals.tensor_bytes),
        "predicted peak": format_bytes(totals.predicted_tensor_bytes),
        "error of memory": "" if totals.memory_error is None else format_error(totals.memory_error),
    }


def _describe_settings(comparison: Comparison) -> list[str]:
    """Return the settings of plans and tasks that differ, as two sentences."""
    # The plan of an older or damaged run may not load; its results are still worth showing.
    try:
        plans = "; ".join(comparison.plan_differences) or "none"
    except ValueError as error:
        plans = f"not known: {error}"
    tasks = "; ".join(comparison.task_differences) or "none"
    # A user's own function has no fields to compare.
    unknown = " and ".join(make_printable(run.name) for run in comparison.runs if not has_task_fields(run))
    limit = f" (of {unknown} only the task's name and steps are known)" if unknown else ""
    return [f"Plan settings that differ: {plans}.", f"Task settings that differ: {tasks}{limit}."]


def _create_chart() -> Chart:
    axis_x = {
        "showgrid": False,
        "zeroline": False,
        "nticks": 6,
        "rangemode": "tozero",
        "separatethousands": True,
    }
    layout = {
        "height": 340,
        "autosize": True,
        "margin": {"l": 48, "r": 12, "t": 28, "b": 36},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "var(--jp-ui-font-family, system-ui, sans-serif)", "size": 11},
        # The table's heading is the legend: in a low chart plotly's own would lie over the title.
        "showlegend": False,
        # Zooming one chart zooms the other, because both share the steps.
        "xaxis": {**axis_x, "anchor": "y", "matches": "x2", "showticklabels": False},
        "xaxis2": {**axis_x, "anchor": "y2", "title": {"text": "step", "standoff": 4}},
    }
    # Two lines in each of two charts, created once: redraw only fills them.
    empty = [
        {
            "type": "scatter",
            "xaxis": name_axis("x", number),
            "yaxis": name_axis("y", number),
            "x": [],
            "y": [],
        }
        for number in range(2)
        for _ in range(2)
    ]
    chart = Chart(data=empty, layout=layout)
    chart.label = "Loss and speed of both runs by step. The table has the numbers."
    chart._config = {"displayModeBar": False, "responsive": True}
    return chart


_AXIS: dict[str, object] = {
    "zeroline": False,
    "nticks": 5,
    "separatethousands": True,
    "gridcolor": "rgba(128,128,128,.2)",
}


def _can_be_drawn(value: float) -> bool:
    return isfinite(value) and abs(value) < MAX_VALUE


def _build_trace(curve: Curve, index: int, number: int) -> dict[str, object]:
    """Return one run's line, with a colour, dash and marker that distinguish it from the other run's."""
    line = Line()
    for step, value in sorted(curve.points.items()):
        line.add_point(step + curve.first_step, value if _can_be_drawn(value) else float("nan"))
    return {
        "x": list(line.x),
        # JSON has no NaN: None leaves a gap in the line.
        "y": [None if isnan(value) else value for value in line.y],
        "name": escape(curve.run),
        "mode": "lines+markers" if len(line.x) <= FEW_POINTS else "lines",
        "line": {"color": RANK_COLOURS[index], "dash": RANK_DASHES[index], "width": 1.8},
        "marker": {"symbol": ("circle", "square-open")[index], "size": 6},
        "hovertemplate": f"{escape(curve.run)}: %{{y:,.4~r}} at step %{{x:,}}<extra></extra>",
    }


def _needs_log(curves: Sequence[Curve]) -> bool:
    values = [value for curve in curves for value in curve.points.values() if _can_be_drawn(value)]
    return bool(values) and min(values) > 0 and max(values) / min(values) > LOG_FROM_RATIO


def _build_title(text: str, number: int) -> dict[str, object]:
    return {
        "text": escape(text),
        "x": 0,
        "y": DOMAINS[number][1],
        "xref": "paper",
        "yref": "paper",
        "xanchor": "left",
        "yanchor": "bottom",
        "yshift": 2,
        "showarrow": False,
        "font": {"size": 12},
    }


def _build_predicted_label(values: str, number: int) -> dict[str, object]:
    return {
        **_build_title(f"predicted {values}", number),
        "x": 1,
        "xanchor": "right",
        "font": {"size": 10},
    }


def _describe_missing(label: str, curves: Sequence[Curve]) -> list[str]:
    """Describe the curves, and parts of curves, that the runs did not log."""
    if not any(curve.points for curve in curves):
        return [f"Neither run logged {label}."]
    sentences = []
    for curve in curves:
        lacking = [step for step, value in curve.points.items() if not _can_be_drawn(value)]
        if not curve.points:
            sentences.append(f"{curve.run} logged no {label}.")
        elif lacking:
            among = f"{len(lacking):,} of {len(curve.points):,} logged steps"
            sentences.append(
                f"{curve.run}: {label} is NaN or infinite in {among}, first at {min(lacking):,}."
            )
    return sentences
