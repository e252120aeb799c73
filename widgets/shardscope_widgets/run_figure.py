"""The one figure of the run view: loss, throughput and memory of each rank, extended as records arrive."""

from __future__ import annotations

from math import isfinite
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from shardscope_widgets.figures import Chart, survive_reload
from shardscope_widgets.predicted_peak import PredictedPeak, Unit
from shardscope_widgets.theme import RANK_COLOURS, RANK_DASHES

MAX_LINES = 8
"""Ranks that get a line of their own."""
MAX_POINTS = 2000
"""Points of a line; a longer one is thinned to half of them."""
FIRST_STEPS = 40.0
FEW_POINTS = 10
"""Up to so many are marked: a line of one point cannot be seen."""
PANELS = (("loss", "loss"), ("tokens_per_second", "tokens/s per rank"), ("peak_memory_bytes", "memory"))


class RunFigure:
    """A FigureWidget, and for each of its lines the points that it has."""

    def __init__(self) -> None:
        self.widget = _empty_figure()
        self._points: list[tuple[list[float], list[float]]] = []
        self._unit = Unit.of(0)
        self._end = self._most_steps = FIRST_STEPS
        self._highest = 0.0
        self.start(0, None, self._unit)

    def start(
        self, num_ranks: int, predicted: PredictedPeak | None, unit: Unit, total_steps: int | None = None
    ) -> None:
        """Empty all lines and show those of ``num_ranks`` ranks, with the prediction as a level.

        The axis of steps grows by doubling, up to ``total_steps`` where that is known: it seldom moves.
        """
        self._points = [([], []) for _ in self.widget.data]
        self._unit = unit
        self._most_steps = max(total_steps - 1.0, 1.0) if total_steps else float("inf")
        self._end = min(FIRST_STEPS, self._most_steps)
        with self.widget.batch_update():
            for index, line in enumerate(self.widget.data):
                line.x, line.y = [], []
                line.visible = index % MAX_LINES < num_ranks
            self._highest = predicted.num_bytes / unit.num_bytes if predicted else 0.0
            self.widget.layout.shapes = [_level(self._highest)] if predicted else []
            self.widget.layout.yaxis3.range = self._memory_range
            for axis in ("xaxis", "xaxis2", "xaxis3"):
                self.widget.layout[axis].range = [0, self._end]
            for axis in ("yaxis", "yaxis2", "yaxis3"):
                # Else the numbers of the run before stay until the first of this one.
                self.widget.layout[axis].showticklabels = False
            self.widget.layout.annotations[2].text = f"{PANELS[2][1]}, {unit.name}"

    def extend(self, records: list[dict[str, Any]]) -> None:
        """Add records that were not there yet, and draw the lines that grew."""
        grown: set[int] = set()
        for record in records:
            step, rank = record.get("step"), record.get("rank")
            if not isinstance(step, int | float) or not isinstance(rank, int) or rank >= MAX_LINES:
                continue
            self._make_room(step)
            for panel, (name, _) in enumerate(PANELS):
                value = record.get(name)
                if isinstance(value, int | float):
                    index = panel * MAX_LINES + rank
                    if name.endswith("_bytes"):
                        value /= self._unit.num_bytes
                        self._highest = max(self._highest, value if isfinite(value) else 0.0)
                    self._add(index, step, value)
                    grown.add(index)
        if not grown:
            return
        layout = self.widget.layout
        with self.widget.batch_update():
            for index in grown:
                line, points = self.widget.data[index], self._points[index]
                line.x, line.y = map(list, points)
                line.mode = "lines+markers" if len(points[0]) <= FEW_POINTS else "lines"
            for axis in (layout.xaxis, layout.xaxis2, layout.xaxis3):
                axis.range = [0, self._end]
            layout.yaxis3.range = self._memory_range
            for axis in (layout.yaxis, layout.yaxis2, layout.yaxis3):
                axis.showticklabels = True

    @property
    def _memory_range(self) -> list[float]:
        """From nothing to a little above the highest, for the level is not to run through the title."""
        return [0, 1.15 * self._highest or 1.0]

    def _make_room(self, step: float) -> None:
        while step > self._end:
            doubled = 2 * self._end
            is_last = self._end < self._most_steps <= doubled
            self._end = self._most_steps if is_last else doubled

    def _add(self, index: int, step: float, value: float) -> None:
        steps, values = self._points[index]
        steps.append(step)
        values.append(value)
        if len(steps) > MAX_POINTS:
            self._points[index] = (steps[::2], values[::2])


def _empty_figure() -> Chart:
    figure = Chart(
        make_subplots(
            rows=1, cols=len(PANELS), subplot_titles=[title for _, title in PANELS], horizontal_spacing=0.07
        )
    )
    for panel in range(len(PANELS)):
        for rank in range(MAX_LINES):
            figure.add_trace(
                go.Scatter(
                    x=[],
                    y=[],
                    mode="lines",
                    name=f"rank {rank}",
                    visible=False,
                    marker={"size": 4},
                    line={
                        "color": RANK_COLOURS[rank],
                        "width": 1.5,
                        "dash": RANK_DASHES[rank % len(RANK_DASHES)],
                    },
                    hovertemplate=f"rank {rank}, step %{{x}}: %{{y:.4g}}<extra></extra>",
                ),
                row=1,
                col=panel + 1,
            )
    figure.update_layout(
        height=216,
        autosize=True,
        margin={"l": 40, "r": 8, "t": 26, "b": 34},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        showlegend=False,
        transition={"duration": 0},
    )
    figure.update_xaxes(
        zeroline=False,
        showgrid=False,
        title={"text": "step", "standoff": 4, "font": {"size": 12}},
        rangemode="tozero",
    )
    figure.update_yaxes(zeroline=False, nticks=5)
    figure.update_yaxes(rangemode="tozero", col=2)
    figure.update_yaxes(rangemode="tozero", col=3)
    figure.update_annotations(font={"size": 12})
    figure._config = {"displayModeBar": False, "responsive": True}
    return survive_reload(figure)


def _level(height: float) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "x3 domain",
        "yref": "y3",
        "x0": 0,
        "x1": 1,
        "y0": height,
        "y1": height,
        "line": {"width": 1, "dash": "longdash", "color": "#66707a"},
    }
