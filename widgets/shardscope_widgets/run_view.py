"""One run while it happens and afterwards: status, loss, throughput, memory, logs, and the way to stop it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as widgets
import traitlets

import shardscope as ss
from shardscope_widgets import shared
from shardscope_widgets.predicted_peak import PredictedPeak, Unit, predicted_peak
from shardscope_widgets.run_figure import MAX_LINES, RunFigure
from shardscope_widgets.sheet import Sheet
from shardscope_widgets.theme import RANK_COLOURS
from shardscope_widgets.view import View

POLL_SECONDS = 0.25
LOG_BYTES = 16 * 1024
PROFILER_TALK = re.compile(r"^USDT:.*\n?", re.MULTILINE)
"""What torch's profiler prints of itself; no setting silences that but with its errors."""
ENDED = ("finished", "stopped", "failed", "lost")


class RunView(View):
    """Shows ``run`` live, at most four times a second, from its folder alone: any number may watch."""

    status = traitlets.Unicode("", help="The run's status as last shown.").tag(sync=False)
    num_steps = traitlets.Int(0, help="Steps that rank 0 has logged.").tag(sync=False)

    def __init__(self, run: ss.Run | None = None, *, on_end: Callable[[ss.Run], None] | None = None) -> None:
        self.run: ss.Run | None = None
        self._on_end = on_end
        self._lock = threading.RLock()
        self._seen = (0, "", "")
        self._latest: dict[int, dict[str, Any]] = {}
        self._note = ""
        self._total_steps: int | None = None
        self._predicted: PredictedPeak | None = None
        self._unit = Unit.of(0)
        self.head = shared.html()
        self.stop_button = shared.button("Stop", "ss-ghost", tooltip="End this run", disabled=True)
        self.stop_button.on_click(self._stop)
        # Made with the first run: a FigureWidget sends 5 MB of front end, which planning alone does not need.
        self.figure: RunFigure | None = None
        self._figure_place = widgets.VBox(layout=shared.layout())
        self.what = shared.html()
        self.error = shared.html()
        self.rank = widgets.ToggleButtons(options=[("rank 0", 0)], tooltips=["Log of rank 0"])
        self.rank.add_class("ss-seg")
        self.rank.observe(lambda _: self._show_log(), "value")
        self.log_text = shared.html()
        self.table = shared.html()
        top = widgets.HBox(
            [self.head, self.stop_button],
            layout=widgets.Layout(justify_content="space-between", align_items="center", min_height="44px"),
        )
        log_head = widgets.HBox(
            [shared.html("<h2>Log</h2>"), self.rank],
            layout=widgets.Layout(align_items="center", grid_gap="16px", margin="12px 0 4px"),
        )
        log_head.add_class("ss-log-head")
        self._of_a_run = widgets.VBox(
            [self._figure_place, self.table, self.what, log_head, self.log_text],
            layout=widgets.Layout(display="none"),
        )
        super().__init__([Sheet(), top, self.error, self._of_a_run])
        self.add_class("ss-root")
        self.add_class("ss-run")
        if run is not None:
            self.show(run)
        else:
            self.head.value = (
                "<span class='ss-hint'>No run yet: one that is started shows itself here.</span>"
            )

    def show(self, run: ss.Run, note: str = "", total_steps: int | None = None) -> None:
        """Watch ``run`` from now on.

        ``note`` stays above the charts (what a rehearsal leaves out); ``total_steps`` is where it is going.
        """
        with self._lock:
            self.run = run
            self._total_steps = total_steps
            self._note = note
            self._seen = (0, "", "")
            self._latest = {}
            self.num_steps = 0
            self._predicted = predicted_peak(run)
            self._unit = Unit.of(self._predicted.num_bytes if self._predicted else 0)
            ranks = min(run.world_size, MAX_LINES)
            self.rank.options = [(f"rank {rank}", rank) for rank in range(ranks)]
            if self.figure is None:
                self.figure = RunFigure()
                self._figure_place.children = [self.figure.widget]
            self.figure.start(ranks, self._predicted, self._unit, total_steps)
            self._of_a_run.layout.display = ""
            self.error.value = self.what.value = self.table.value = ""
        threading.Thread(target=self._watch, args=(run,), daemon=True, name="shardscope-run-view").start()

    def close(self) -> None:
        """Close the view. The run goes on, and other views of it too."""
        with self._lock:  # Not while its thread draws.
            self.run = None
            super().close()

    def refresh(self) -> None:
        """Read what is new in the run's folder and draw it."""
        with self._lock:
            run = self.run
            if run is None:
                return
            # Stop and status first: whatever a task logs, a run can be seen and stopped.
            status = run.status
            self.stop_button.disabled = status in (*ENDED, "stopping")
            self.status = status
            self._show_log()
            metrics = run.metrics()
            # The reason too: of a run that hangs nothing else changes.
            seen = (len(metrics), status, run.reason)
            new = metrics[self._seen[0] :]
            if not new and seen == self._seen:
                return
            if self.figure is not None:
                self.figure.extend(new)
            self._latest.update({r["rank"]: r for r in new if "loss" in r and isinstance(r.get("rank"), int)})
            self.num_steps += sum(1 for record in new if record.get("rank") == 0 and "loss" in record)
            self._describe(run, status)
            self._seen = seen

    def _watch(self, run: ss.Run) -> None:
        """Runs in a thread of its own: cells may block the kernel's main thread at any time."""
        ended = False
        try:
            while self.run is run and not ended:
                started = time.monotonic()
                # Asked before the refresh: what was written up to the end is then drawn by it.
                ended = run.status in ENDED
                try:
                    self.refresh()
                except Exception as error:  # the folder may vanish under way: the view says so and lives on
                    self.error.value = _alert(f"This view cannot show the run: {error}")
                time.sleep(0 if ended else max(0.02, POLL_SECONDS - (time.monotonic() - started)))
        finally:
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

    def _describe(self, run: ss.Run, status: str) -> None:
        last = self._latest.get(0)
        numbers = ""
        if last:
            numbers = f" · {self._steps(last.get('step'))} · loss {_number(last.get('loss'), '.3f')}"
            if "tokens_per_second" in last:
                numbers += f" · {_number(last['tokens_per_second'], ',.0f')} tokens/s per rank"
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
        record = run.what_it_was().get(0, {})
        self.what.value = _what_it_was(record) + (_measured(run) if "memory" in record else "")
        self.table.value = _table(self._latest, self._predicted, self._unit, "engine" in record)

    def _steps(self, last: Any) -> str:
        """Steps done: the first has the number 0, and a task of one's own may count as it likes."""
        if self._total_steps and isinstance(last, int):
            return f"{last + 1:,} of {self._total_steps:,} steps"
        return f"step {_number(last, ',')}"

    def _show_log(self) -> None:
        run = self.run
        if run is None:
            return
        text = PROFILER_TALK.sub("", run.logs(self.rank.value or 0, LOG_BYTES))
        nothing = "nothing printed" if self.status in ENDED else "nothing printed yet"
        self.log_text.value = (
            f"<pre class='ss-log' tabindex='0' aria-label='log of rank {self.rank.value}'>"
            f"{escape(text) or nothing}</pre>"
        )


def _what_it_was(record: dict[str, Any]) -> str:
    """One sentence on what the engine of rank 0 really made."""
    words = record.get("engine", {}).get("sentence")
    return f"<div class='ss-hint'>What it really was: {escape(str(words))}</div>" if words else ""


def _measured(run: ss.Run) -> str:
    """One sentence on what the ranks measured, beside what was predicted."""
    return f"<div class='ss-hint'>{escape(run.memory().sentence)}</div>"


def _table(
    latest: dict[int, dict[str, Any]], predicted: PredictedPeak | None, unit: Unit, has_engine: bool
) -> str:
    """The last numbers of each rank: the charts in words."""
    if not latest:
        return ""
    rows = "".join(
        f"<tr><td>{_swatch(rank)}rank {rank}</td><td>{_number(record.get('step'), ',')}</td>"
        f"<td>{_number(record.get('loss'), '.3f')}</td>"
        f"<td>{_number(record.get('tokens_per_second'), ',.0f')}</td>"
        f"<td>{_number(record.get('peak_memory_bytes'), '', unit)}</td></tr>"
        for rank, record in sorted(latest.items())
    )
    # A task of one's own that does not use the engine has nothing to do with the plan's model.
    beside = ""
    if has_engine and predicted:
        beside = f"Long dashes: predicted {unit.show(predicted.num_bytes)} {unit.name} {predicted.of}."
    return (
        "<table class='ss-table'><thead><tr><th>latest</th><th>step</th><th>loss</th><th>tokens/s</th>"
        f"<th>memory, {unit.name}</th></tr></thead><tbody>{rows}</tbody></table>"
        f"<div class='ss-hint'>{beside}</div>"
    )


def _swatch(rank: int) -> str:
    if rank >= MAX_LINES:
        return ""
    return f"<i class='ss-swatch' style='background:{RANK_COLOURS[rank]}'></i>"


def _number(value: Any, form: str, unit: Unit | None = None) -> str:
    """``value`` in ``form`` or ``unit``; a dash for whatever else a task may have logged."""
    if not isinstance(value, int | float):
        return "–"
    return unit.show(value) if unit else format(value, form)


def _alert(message: str) -> str:
    return f"<div class='ss-error' role='alert'>{escape(message)}</div>"
