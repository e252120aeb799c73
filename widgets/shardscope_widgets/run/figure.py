"""The figure of the run view: one chart per metric, one line per rank, extended as records arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from math import isfinite, nan
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from shardscope.runs.explain.predicted_metrics import PredictedMetrics
from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.kit.numbers import format_short
from shardscope_widgets.kit.theme import RANK_COLOURS, RANK_DASHES
from shardscope_widgets.run.lines import Agreement, Line
from shardscope_widgets.run.panels import (
    MAX_NAMES,
    SLOTS,
    Panel,
    Position,
    arrange_grid,
    find_first_numbers,
    is_number,
    list_panels,
)

MAX_LINES = 8
"""Maximum number of ranks with their own line."""
ALL_RANKS = "all ranks"
"""Label of a line that stands for every rank, as their values are equal."""
WIDTH_FOR_TWO_LABELS = 280
"""Pixels of a chart whose title leaves room for both labels beside it; else the prediction alone is there."""
PREDICTED_STYLE = {"width": 1, "dash": "longdash", "color": "#66707a"}
FIRST_STEPS = 40.0
FIRST_MINUTES = 1 / 6
MIN_POINTS = 3
"""Least number of points of a line from which their median decides the unit of a chart."""
FEW_POINTS = 10
"""Lines with up to this many points have markers: a line of one point would be invisible."""
ROOM = 1.15
"""Upper end of an axis, as a multiple of its highest value."""
ROUNDING = 1e-6
"""Largest relative difference of values that count as equal: float32 has 24 bits."""
CEILING = 0.98
"""Height at which outliers are drawn, as a fraction of the axis: inside the plot."""


class Sample(NamedTuple):
    """The values that one rank logged at one position of the horizontal axis."""

    x: float
    rank: int
    metrics: Mapping[str, object]


class RunFigure:
    """A FigureWidget whose charts appear with their metrics; it is updated and never rebuilt."""

    def __init__(self) -> None:
        self.widget = _create_figure()
        self.panels: list[Panel] = []
        self._metrics: dict[str, None] = {}
        """Metrics in order of appearance."""
        self._settled: set[str] = set()
        """Metrics that had a finite value, from which the unit of their chart was derived."""
        self._slots: dict[str, int] = {}
        self._units: dict[str, tuple[str, float]] = {}
        """Metric -> its unit and the divisor of its values, once their magnitude is known."""
        self._traces: dict[tuple[int, int], int] = {}
        """(slot, rank) -> trace index; traces of earlier runs are reused."""
        self._lines: dict[tuple[int, int], Line] = {}
        self._agreements: dict[int, Agreement] = {}
        """Slot -> whether the ranks' values are equal; equal lines are drawn once."""
        self._united: set[int] = set()
        """Slots that are drawn with one line for all ranks."""
        self._ceilings: dict[int, float] = {}
        """Slot -> height at which values above the axis are drawn."""
        self._expected: PredictedMetrics | None = None
        self._num_ranks = 0
        self._width = 0
        self._end = self._most_steps = FIRST_STEPS

    @property
    def has_lines(self) -> bool:
        """Return whether any chart has a point."""
        return bool(self._lines)

    @property
    def charts(self) -> dict[Panel, tuple[str, float]]:
        """The charts, each with its unit and the divisor of its values."""
        return {panel: self._units.get(panel.metric, ("", 1.0)) for panel in self.panels}

    def start_run(
        self,
        num_ranks: int,
        expected: PredictedMetrics | None = None,
        total_steps: int | None = None,
        metrics: Iterable[str] = (),
    ) -> None:
        """Clear all charts and show those of ``metrics``; others appear with their first value.

        The range of the step axis doubles when needed, up to ``total_steps`` if that is known, so that it
        changes rarely.
        """
        # More lines could not be told apart: the table and the slowest rank still consider all ranks.
        self._num_ranks = min(num_ranks, MAX_LINES)
        self._metrics, self._slots, self._units, self._lines = {}, {}, {}, {}
        self._ceilings = {}
        self._agreements, self._united = {}, set()
        self._settled = set()
        self._expected = expected
        self._most_steps = _find_last_step(total_steps)
        self._end = min(FIRST_STEPS, self._most_steps)
        with self.widget.batch_update():
            for trace in self.widget.data:
                trace.x, trace.y, trace.visible = [], [], False
            self._show_panels(metrics, {})
            self._fit_axes()

    def set_expected(self, expected: PredictedMetrics | None) -> None:
        """Set the predictions; for a user's function they are known once its model is."""
        if expected == self._expected:
            return
        self._expected = expected
        with self.widget.batch_update():
            self._show_panels((), {})
            self._fit_axes()

    def set_total_steps(self, total_steps: int | None) -> None:
        """Set the planned number of steps, which some tasks find when their data is read."""
        last = _find_last_step(total_steps)
        if last == self._most_steps:
            return
        self._most_steps = last
        by_step = {self._slots[panel.metric] for panel in self.panels if panel.by == "step"}
        drawn = max((line.x[-1] for (slot, _), line in self._lines.items() if slot in by_step), default=0.0)
        self._end = max(drawn, min(self._end, last))
        with self.widget.batch_update():
            self._fit_axes()

    def fit_width(self, width: int) -> None:
        """Arrange the charts for a width of ``width`` pixels."""
        before, self._width = arrange_grid(len(self.panels), self._width), width
        if arrange_grid(len(self.panels), width) != before:
            with self.widget.batch_update():
                self._place_charts()

    def add_records(self, records: Sequence[Mapping[str, object]]) -> None:
        """Add new records and redraw the lines that they extend."""
        samples = [sample for record in records if (sample := self._read_sample(record)) is not None]
        if not samples:
            return
        for sample in samples:
            self._extend_step_axis(sample.x)
        self._add_points(samples, "step", find_first_numbers(sample.metrics for sample in samples))

    def show_gpu_samples(self, records: Sequence[Mapping[str, float]], start_time: float) -> None:
        """Redraw all GPU samples; ``start_time`` is the time of the first, in seconds since the epoch."""
        samples = [
            Sample(max(0.0, record["time"] - start_time) / 60, int(record["rank"]), record)
            for record in records
            if record["rank"] < self._num_ranks
        ]
        first_values = find_first_numbers(sample.metrics for sample in samples)
        gpu_metrics = [panel.metric for panel in list_panels(first_values) if panel.by == "minute"]
        # NVML samples are read again as a whole: their lines start anew instead of being extended.
        for metric in gpu_metrics:
            for rank in range(self._num_ranks):
                self._lines.pop((self._slots.get(metric, -1), rank), None)
        self._add_points(samples, "minute", {metric: first_values[metric] for metric in gpu_metrics})

    def _read_sample(self, record: Mapping[str, object]) -> Sample | None:
        """Return a logged record as a sample; None if it is malformed or its rank has no line."""
        step, rank = record.get("step"), record.get("rank")
        if not (is_number(step) and isfinite(step) and is_number(rank) and 0 <= rank < self._num_ranks):
            return None
        return Sample(step, int(rank), record)

    def _add_points(self, samples: Iterable[Sample], by: str, first_values: Mapping[str, float]) -> None:
        """Extend the lines of all charts whose horizontal axis is ``by``, and redraw these lines."""
        # All in one batch: the view receives the whole figure at each change (kit/chart.py).
        grown: dict[tuple[int, int], Line] = {}
        with self.widget.batch_update():
            new = {metric: value for metric, value in first_values.items() if self._is_new(metric)}
            if new:
                self._show_panels(new, new)
            panels = [panel for panel in self.panels if panel.by == by and panel.metric in self._units]
            for x, rank, metrics in samples:
                for panel in panels:
                    value = metrics.get(panel.metric)
                    if is_number(value):
                        key = (self._slots[panel.metric], rank)
                        grown[key] = line = self._lines.setdefault(key, Line())
                        line.add_point(x, value / self._units[panel.metric][1])
                        if by == "step":
                            self._agreements.setdefault(key[0], Agreement()).add(x, rank, value)
            grown |= self._enlarge_units(panels)
            self._draw_lines({**grown, **self._find_reclipped_lines(), **self._unite_equal_lines()})
            self._fit_axes()

    def _enlarge_units(self, panels: Iterable[Panel]) -> dict[tuple[int, int], Line]:
        """Rescale charts whose usual values have outgrown their unit, such as steps of over 1,000 ms.

        Return the rescaled lines. A unit never becomes smaller again, so one slow step does not decide it.
        """
        rescaled: dict[tuple[int, int], Line] = {}
        for panel in panels:
            divisor = self._units[panel.metric][1]
            slot = self._slots[panel.metric]
            lines = [line.y for (other, _), line in self._lines.items() if other == slot]
            if max(map(len, lines), default=0) < MIN_POINTS:
                continue
            values = np.abs(np.concatenate(lines))
            known = values[np.isfinite(values)]
            unit = panel.choose_unit(float(np.median(known)) * divisor) if len(known) else ("", 0.0)
            if unit[1] <= divisor:
                continue
            self._units[panel.metric] = unit
            for key, line in self._lines.items():
                if key[0] == slot:
                    line.scale(divisor / unit[1])
                    rescaled[key] = line
        if rescaled:
            self._place_charts()
        return rescaled

    def _is_new(self, metric: str) -> bool:
        known = metric in self._metrics or len(self._metrics) < MAX_NAMES
        return known and metric not in self._settled

    def _show_panels(self, metrics: Iterable[str], first_values: Mapping[str, float]) -> None:
        """Assign a chart to each metric; its prediction or first value determines the unit."""
        for metric in metrics:
            if len(self._metrics) < MAX_NAMES:
                self._metrics[metric] = None
        self.panels = [self._name_content(panel) for panel in list_panels(self._metrics)]
        for panel in self.panels:
            if panel.metric not in self._slots:
                used_slots = self._slots.values()
                self._slots[panel.metric] = next(slot for slot in range(SLOTS) if slot not in used_slots)
            # From one value, not from each: a changing unit would rescale a line while the user reads it.
            typical = self._find_predicted(panel) or first_values.get(panel.metric, nan)
            if panel.metric not in self._units and isfinite(typical):
                self._units[panel.metric] = panel.choose_unit(abs(typical))
        self._settled |= {metric for metric, value in first_values.items() if isfinite(value)}
        self._place_charts()

    def _name_content(self, panel: Panel) -> Panel:
        """Return ``panel`` titled by what its bytes are, if that is known."""
        if self._expected is None or panel.metric != "peak_memory_bytes":
            return panel
        return replace(panel, title=self._expected.memory_title)

    def _find_predicted(self, panel: Panel) -> float | None:
        return self._expected.get(panel.metric) if self._expected else None

    def _draw_lines(self, grown: Mapping[tuple[int, int], Line]) -> None:
        # Traces are never removed: plotly would renumber the others, and a removal redraws the figure.
        missing = [key for key in grown if key not in self._traces]
        if missing:
            first = len(self.widget.data)
            self.widget.add_traces([_build_trace(slot, rank) for slot, rank in missing])
            self._traces |= {key: first + number for number, key in enumerate(missing)}
        units = {self._slots[panel.metric]: unit for panel, (unit, _) in self.charts.items()}
        for key, line in grown.items():
            trace = self.widget.data[self._traces[key]]
            x, y = line.to_arrays()
            trace.x, trace.y = x, np.minimum(y, self._ceilings.get(key[0], np.inf))
            # The tooltip shows the logged value, even for an outlier that is drawn at the ceiling.
            trace.customdata = y
            trace.mode = "lines+markers" if len(line.x) <= FEW_POINTS else "lines"
            slot, rank = key
            is_united = slot in self._united
            trace.visible = not is_united or rank == min(
                other for place, other in self._lines if place == slot
            )
            trace.hovertemplate = _write_tooltip(
                ALL_RANKS if is_united else f"rank {rank}", units.get(slot, "")
            )

    def _unite_equal_lines(self) -> dict[tuple[int, int], Line]:
        """Update which charts have one line for all ranks, and return the lines of those that changed."""
        united = {
            slot
            for slot, agreement in self._agreements.items()
            if agreement.includes([rank for other, rank in self._lines if other == slot])
        }
        changed = united ^ self._united
        self._united = united
        if changed:
            self._place_charts()
        return {key: line for key, line in self._lines.items() if key[0] in changed}

    def _find_reclipped_lines(self) -> dict[tuple[int, int], Line]:
        """Return the lines whose ceiling has changed and which must be redrawn completely.

        plotly clips a line at the border of the plot, where it would overlap the title.
        """
        changed: dict[tuple[int, int], Line] = {}
        for panel in self.panels:
            if not panel.is_bounded:
                continue
            slot = self._slots[panel.metric]
            ceiling = CEILING * self._find_axis_top(panel)
            if self._ceilings.get(slot) != ceiling:
                self._ceilings[slot] = ceiling
                changed |= {key: line for key, line in self._lines.items() if key[0] == slot}
        return changed

    def _place_charts(self) -> None:
        """Position every chart, its title above it, and its prediction as a horizontal line."""
        arranged = arrange_grid(len(self.panels), self._width)
        layout = self.widget.layout
        # plotly has no titles for subplots: titles and predictions are annotations and shapes.
        notes, levels = [], []
        for panel, place in zip(self.panels, arranged.positions, strict=True):
            slot = self._slots[panel.metric]
            xaxis, yaxis = _find_axes(layout, slot)
            xaxis.domain, yaxis.domain = place.x, place.y
            xaxis.title.text = panel.by
            yaxis.exponentformat = panel.exponents
            unit = self.charts[panel][0]
            notes.append(_build_title(f"{panel.title}, {unit}" if unit else panel.title, place))
            label = ""
            if (level := self._find_level(panel)) is not None:
                levels.append(build_predicted_line(slot, level, PREDICTED_STYLE))
                label = f"predicted {format_short(level)}"
            # The width is 0 until the browser has told it.
            has_room = not self._width or self._width * (place.x[1] - place.x[0]) >= WIDTH_FOR_TWO_LABELS
            if slot in self._united and (has_room or not label):
                label = " · ".join(filter(None, [ALL_RANKS, label]))
            if label:
                notes.append(_build_side_label(label, place))
        # Axes of unused slots are hidden: plotly draws empty axes too.
        for slot in range(SLOTS):
            for axis in _find_axes(layout, slot):
                axis.visible = slot in self._slots.values()
        layout.height = arranged.height
        layout.annotations, layout.shapes = notes, levels

    def _find_level(self, panel: Panel) -> float | None:
        predicted = self._find_predicted(panel)
        return predicted / self._units[panel.metric][1] if predicted else None

    def _find_axis_top(self, panel: Panel) -> float:
        """Return the upper end of the axis of a chart that begins at zero."""
        return ROOM * max(self._find_level(panel) or 0.0, self._find_highest(panel)) or 1.0

    def _find_highest(self, panel: Panel) -> float:
        """Return the highest value on the axis of a chart, in its unit; 0 without points."""
        slot = self._slots[panel.metric]
        lines = [line for (other, _), line in self._lines.items() if other == slot]
        return max(
            (line.find_usual_top() if panel.is_bounded else line.find_top() for line in lines), default=0.0
        )

    def _fit_axes(self) -> None:
        for panel in self.panels:
            slot = self._slots[panel.metric]
            xaxis, yaxis = _find_axes(self.widget.layout, slot)
            lines = [line for (other, _), line in self._lines.items() if other == slot]
            # Without lines plotly would keep the tick labels of the previous run.
            yaxis.showticklabels = bool(lines)
            if panel.by == "step":
                xaxis.range = [0, self._end]
            elif lines:
                xaxis.range = [0, max(FIRST_MINUTES, *(line.x[-1] for line in lines))]
            # Room above 100 %: a line on the border of the plot would be clipped.
            if panel.is_percent:
                yaxis.range, yaxis.autorange = [0, 105], False
            elif panel.from_zero:
                yaxis.range, yaxis.autorange = [0, self._find_axis_top(panel)], False
            elif (level := _find_constant(lines)) is not None:
                # plotly's own range is one up and one down: a constant rate of 0.001 would look like 0.
                yaxis.range, yaxis.autorange = sorted((0, ROOM * level or 1)), False
            elif yaxis.range is not None:
                # Another run's chart had this slot, or its values were equal so far.
                yaxis.range, yaxis.autorange = None, True

    def _extend_step_axis(self, step: float) -> None:
        while step > self._end:
            doubled = 2 * self._end
            # The last doubling ends at the run's planned steps instead of leaving half of the axis empty.
            is_last = self._end < self._most_steps <= doubled
            self._end = self._most_steps if is_last else doubled


def _find_last_step(total_steps: int | None) -> float:
    """Return the number of a run's last step, at least 1; infinity if it is not known."""
    return max(float(total_steps), 1.0) if total_steps else float("inf")


def _find_constant(lines: Iterable[Line]) -> float | None:
    """Return the value that all points of ``lines`` have; None if they differ or there is none."""
    values = [value for line in lines for value in line.y if isfinite(value)]
    if not values:
        return None
    low, high = min(values), max(values)
    # On an axis of its own, the rounding of float32 would look like a curve.
    return high if high - low <= ROUNDING * max(abs(low), abs(high)) else None


def _find_axes(layout: go.Layout, slot: int) -> tuple[go.layout.XAxis, go.layout.YAxis]:
    return layout[name_axis("xaxis", slot)], layout[name_axis("yaxis", slot)]


def name_axis(letter: str, number: int) -> str:
    """Return plotly's name of an axis in the chart with this number from 0: ``x``, ``x2``, ``x3``."""
    return f"{letter}{number + 1}" if number else letter


def _build_trace(slot: int, rank: int) -> dict[str, object]:
    return {
        "type": "scatter",
        "x": [],
        "y": [],
        "xaxis": name_axis("x", slot),
        "yaxis": name_axis("y", slot),
        "mode": "lines",
        "name": f"rank {rank}",
        "marker": {"size": 4, "color": RANK_COLOURS[rank]},
        "line": {
            "color": RANK_COLOURS[rank],
            "width": 1.5,
            "dash": RANK_DASHES[rank % len(RANK_DASHES)],
        },
        "hovertemplate": _write_tooltip(f"rank {rank}"),
    }


def _write_tooltip(who: str, unit: str = "") -> str:
    return f"{who}, at %{{x:,.7~r}}: %{{customdata:,.4~r}}{f' {unit}' * bool(unit)}<extra></extra>"


def _create_figure() -> Chart:
    # All axes exist from the start, hidden: a chart appears by showing its axes, not by a new figure.
    axes: dict[str, object] = {}
    for slot in range(SLOTS):
        axes[name_axis("xaxis", slot)] = {
            "anchor": name_axis("y", slot),
            "visible": False,
            "zeroline": False,
            "showgrid": False,
            "rangemode": "tozero",
            "separatethousands": True,
            "nticks": 6,
            # Away from the vertical axis's 0.
            "ticklabelstandoff": 5,
            "title": {"text": "step", "standoff": 4, "font": {"size": 11}},
        }
        axes[name_axis("yaxis", slot)] = {
            "anchor": name_axis("x", slot),
            "visible": False,
            "zeroline": False,
            "separatethousands": True,
            "nticks": 5,
        }
    layout = {
        "height": 216,
        "autosize": True,
        "margin": {"l": 40, "r": 10, "t": 0, "b": 0},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        # The same font as in the stylesheet: plotly measures text in it to place labels.
        "font": {"family": "var(--jp-ui-font-family, system-ui, sans-serif)", "size": 11},
        "showlegend": False,
        **axes,
    }
    figure = Chart(data=[], layout=layout)
    figure.label = "Metrics of each rank by step. The table below has the latest values."
    figure._config = {"displayModeBar": False, "responsive": True}
    return figure


def _build_title(text: str, place: Position) -> dict[str, object]:
    return {
        "text": escape(text),
        "x": place.x[0],
        "y": place.y[1],
        "xref": "paper",
        "yref": "paper",
        "xanchor": "left",
        "yanchor": "bottom",
        "yshift": 4,
        "showarrow": False,
        "font": {"size": 12},
    }


def build_predicted_line(slot: int, height: float, style: Mapping[str, object]) -> dict[str, object]:
    """Return a prediction as a horizontal line across a chart; its number is at the chart's title."""
    return {
        "type": "line",
        "xref": f"{name_axis('x', slot)} domain",
        "yref": name_axis("y", slot),
        "x0": 0,
        "x1": 1,
        "y0": height,
        "y1": height,
        "line": style,
    }


def _build_side_label(text: str, place: Position) -> dict[str, object]:
    """Return a text for the right end of the title line; inside the plot, grid lines would cross it."""
    return {
        "text": text,
        "x": place.x[1],
        "y": place.y[1],
        "xref": "paper",
        "yref": "paper",
        "xanchor": "right",
        "yanchor": "bottom",
        "yshift": 4,
        "showarrow": False,
        "font": {"size": 10},
    }
