"""One run while it happens and afterwards: status, loss, throughput, memory, logs, and the way to stop it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
import traitlets
from plotly.subplots import make_subplots

import shardscope as ss
from shardscope_widgets.predicted_peak import PredictedPeak, Unit, predicted_peak
from shardscope_widgets.sheet import Sheet
from shardscope_widgets.theme import RANK_COLOURS, RANK_DASHES

POLL_SECONDS = 0.25
MAX_LINES = 8
MAX_POINTS = 2000
LOG_BYTES = 16 * 1024
PANELS = (("loss", "loss"), ("tokens_per_second", "tokens/s per rank"), ("peak_memory_bytes", "peak memory"))
ENDED = ("finished", "stopped", "failed", "lost")


class RunView(widgets.VBox):
    """Shows ``run`` live, at most four times a second, from its folder alone: any number may watch."""

    status = traitlets.Unicode("", help="The run's status as last shown.").tag(sync=False)
    num_steps = traitlets.Int(0, help="Steps that rank 0 has logged.").tag(sync=False)

    def __init__(self, run: ss.Run | None = None, *, on_end: Callable[[ss.Run], None] | None = None) -> None:
        self.run: ss.Run | None = None
        self._on_end = on_end
        self._lock = threading.RLock()
        self._seen = (-1, "")
        self._note = ""
        self._predicted: PredictedPeak | None = None
        self._unit = Unit.of(0)
        self.head = widgets.HTML()
        self.stop_button = widgets.Button(description="Stop", tooltip="End this run", disabled=True)
        self.stop_button.add_class("ss-ghost")
        self.stop_button.on_click(self._stop)
        # Made with the first run: a FigureWidget sends 5 MB of front end, which planning alone does not need.
        self.figure: go.FigureWidget | None = None
        self._figure_place = widgets.VBox()
        self.what = widgets.HTML()
        self.error = widgets.HTML()
        self.rank = widgets.ToggleButtons(options=[("rank 0", 0)], tooltips=["Log of rank 0"])
        self.rank.add_class("ss-seg")
        self.rank.observe(lambda _: self._show_log(), "value")
        self.log_text = widgets.HTML("<pre class='ss-log' tabindex='0' aria-label='log'></pre>")
        self.table = widgets.HTML()
        top = widgets.HBox(
            [self.head, self.stop_button],
            layout=widgets.Layout(justify_content="space-between", align_items="center", min_height="44px"),
        )
        log_head = widgets.HBox(
            [widgets.HTML("<h2>Log</h2>"), self.rank],
            layout=widgets.Layout(align_items="center", grid_gap="16px"),
        )
        super().__init__(
            [
                Sheet(),
                top,
                self.error,
                self._figure_place,
                self.table,
                self.what,
                log_head,
                self.log_text,
            ]
        )
        self.add_class("ss-root")
        self.add_class("ss-run")
        if run is not None:
            self.show(run)
        else:
            self.head.value = "<span class='ss-hint'>No run yet: Launch or Rehearse starts one.</span>"

    def show(self, run: ss.Run, note: str = "") -> None:
        """Watch ``run`` from now on; ``note`` stays above the charts (what a rehearsal leaves out)."""
        with self._lock:
            self.run = run
            self._note = note
            self._seen = (-1, "")
            ranks = min(run.world_size, MAX_LINES)
            self.rank.options = [(f"rank {rank}", rank) for rank in range(ranks)]
            self._lay_out_lines(run, ranks)
            self.error.value = self.what.value = self.table.value = ""
            self.refresh()
        threading.Thread(target=self._watch, args=(run,), daemon=True, name="shardscope-run-view").start()

    def refresh(self) -> None:
        """Read what is new in the run's folder and draw it."""
        with self._lock:
            run = self.run
            if run is None:
                return
            status = run.status
            metrics = run.metrics()
            if (len(metrics), status) == self._seen:
                return
            self._seen = (len(metrics), status)
            self._draw(metrics)
            self.num_steps = sum(1 for record in metrics if record["rank"] == 0 and "loss" in record)
            self._describe(run, status, metrics)
            self._show_log()
            self.stop_button.disabled = status in (*ENDED, "stopping")
            self.status = status

    def _watch(self, run: ss.Run) -> None:
        """Runs in a thread of its own: cells may block the kernel's main thread at any time."""
        while self.run is run:
            started = time.monotonic()
            try:
                self.refresh()
            except Exception as error:  # the run's folder may vanish under way; the view says so and lives on
                self.error.value = _alert(f"This view cannot read the run: {error}")
            if run.status in ENDED:
                self.refresh()
                break
            time.sleep(max(0.02, POLL_SECONDS - (time.monotonic() - started)))
        if self.run is run and self._on_end is not None:
            self._on_end(run)

    def _stop(self, _: object) -> None:
        if self.run is None:
            return
        self.stop_button.disabled = True
        try:
            self.run.stop()
        except OSError as error:
            self.error.value = _alert(str(error))

    def _lay_out_lines(self, run: ss.Run, ranks: int) -> None:
        """Lines for each rank of this run; the figure of an earlier run is used again."""
        if self.figure is None:
            self.figure = _empty_figure()
            self._figure_place.children = [self.figure]
        figure = self.figure
        with figure.batch_update():
            for panel in range(len(PANELS)):
                for rank in range(MAX_LINES):
                    line = figure.data[panel * MAX_LINES + rank]
                    line.x, line.y = [], []
                    line.visible = rank < ranks
            figure.layout.shapes = []
            self._predicted = predicted_peak(run)
            self._unit = Unit.of(self._predicted.num_bytes if self._predicted else 0)
            if self._predicted:
                figure.layout.shapes = [_level(self._predicted.num_bytes / self._unit.num_bytes)]
            figure.layout.annotations[2].text = f"{PANELS[2][1]}, {self._unit.name}"

    def _draw(self, metrics: list[dict[str, Any]]) -> None:
        figure = self.figure
        if figure is None:
            return
        last = max((record["step"] for record in metrics if isinstance(record.get("step"), int)), default=0)
        with figure.batch_update():
            for axis in (figure.layout.xaxis, figure.layout.xaxis2, figure.layout.xaxis3):
                axis.range = [0, max(10, last)]
            for panel, (name, _) in enumerate(PANELS):
                unit = self._unit.num_bytes if name.endswith("_bytes") else 1
                for rank in range(MAX_LINES):
                    points = [
                        (record["step"], record[name] / unit)
                        for record in metrics
                        if record["rank"] == rank and isinstance(record.get(name), int | float)
                    ]
                    if not points:
                        continue
                    stride = -(-len(points) // MAX_POINTS)
                    line = figure.data[panel * MAX_LINES + rank]
                    line.x = [step for step, _ in points[::stride]]
                    line.y = [value for _, value in points[::stride]]

    def _describe(self, run: ss.Run, status: str, metrics: list[dict[str, Any]]) -> None:
        last = next((r for r in reversed(metrics) if r["rank"] == 0 and "loss" in r), None)
        numbers = ""
        if last:
            numbers = f" · step {last['step']} · loss {last['loss']:.3f}"
            if "tokens_per_second" in last:
                numbers += f" · {last['tokens_per_second']:,.0f} tokens/s per rank"
        colour = {"failed": "ss-lacks", "lost": "ss-lacks", "finished": "ss-fits"}.get(status, "")
        self.head.value = (
            f"<b class='ss-status {colour}' data-status='{status}'>{status}</b> "
            f"<span class='ss-hint'>{escape(run.name)}{numbers}<br>{escape(run.reason)}</span>"
        )
        note = f"<div class='ss-note'>{escape(self._note)}</div>" if self._note else ""
        failure = run.error if status == "failed" else None
        self.error.value = note + (
            f"<pre class='ss-log ss-error' role='alert'>{escape(failure)}</pre>" if failure else ""
        )
        self.what.value = _what_it_was(run)
        self.table.value = _table(metrics, self._predicted, self._unit)

    def _show_log(self) -> None:
        run = self.run
        if run is None:
            return
        text = run.logs(self.rank.value or 0, LOG_BYTES)
        self.log_text.value = (
            f"<pre class='ss-log' tabindex='0' aria-label='log of rank {self.rank.value}'>"
            f"{escape(text) or 'nothing printed yet'}</pre>"
        )


def _empty_figure() -> go.FigureWidget:
    figure = go.FigureWidget(
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
    return figure


def _level(height: float) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "x3 domain",
        "yref": "y3",
        "x0": 0,
        "x1": 1,
        "y0": height,
        "y1": height,
        "line": {"width": 1, "dash": "dash", "color": "#66707a"},
    }


def _what_it_was(run: ss.Run) -> str:
    """One sentence on what the engine of rank 0 really made."""
    record = run.what_it_was().get(0, {}).get("engine", {})
    if not record:
        return ""
    words = record.get("sentence") or ", ".join(
        f"{key.replace('_', ' ')} {value}"
        for key, value in record.items()
        if isinstance(value, str | int | float)
    )
    return f"<div class='ss-hint'>What it really was: {escape(str(words))}</div>"


def _table(metrics: list[dict[str, Any]], predicted: PredictedPeak | None, unit: Unit) -> str:
    """The last numbers of each rank: the charts in words."""
    latest: dict[int, dict[str, Any]] = {}
    for record in metrics:
        if "loss" in record:
            latest[record["rank"]] = record
    if not latest:
        return ""
    rows = "".join(
        f"<tr><td>{_swatch(rank)}rank {rank}</td><td>{record['step']}</td>"
        f"<td>{_number(record.get('loss'), '.3f')}</td>"
        f"<td>{_number(record.get('tokens_per_second'), ',.0f')}</td>"
        f"<td>{unit.show(record['peak_memory_bytes']) if 'peak_memory_bytes' in record else '–'}</td></tr>"
        for rank, record in sorted(latest.items())
    )
    beside = (
        f" · dashed: predicted {unit.show(predicted.num_bytes)} {unit.name} {predicted.of}"
        if predicted
        else ""
    )
    return (
        "<table class='ss-table'><thead><tr><th>latest</th><th>step</th><th>loss</th><th>tokens/s</th>"
        f"<th>peak {unit.name}</th></tr></thead><tbody>{rows}</tbody></table>"
        f"<div class='ss-hint'>Each rank reads its own part of the text{beside}</div>"
    )


def _swatch(rank: int) -> str:
    if rank >= MAX_LINES:
        return ""
    return f"<i class='ss-swatch' style='background:{RANK_COLOURS[rank]}'></i>"


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "–"


def _alert(message: str) -> str:
    return f"<div class='ss-error' role='alert'>{escape(message)}</div>"
