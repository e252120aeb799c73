"""The view of one run, active or ended: status, progress, charts, logs, memory, and stop buttons."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

import ipywidgets as widgets
import traitlets

import shardscope as ss
from shardscope.records.folder import FINAL, RunFolder
from shardscope.records.follow import Follow
from shardscope.records.nodes import RunNode
from shardscope.runs.explain.failure import find_first_failure
from shardscope.runs.explain.predicted_metrics import PredictedMetrics
from shardscope.runs.profiling_request import is_recording
from shardscope.runs.stop_request import Button
from shardscope.runs.watch.pace import Pace
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
from shardscope_widgets.run import run_html
from shardscope_widgets.run.figure import RunFigure
from shardscope_widgets.run.log import LAUNCHER, RunLog
from shardscope_widgets.run.memory import RunMemory
from shardscope_widgets.run.model_panel import ModelPanel, has_adapters
from shardscope_widgets.run.panels import MAX_NAMES, TRAINING_PANELS, VALIDATION_PANEL, is_number
from shardscope_widgets.run.progress_figures import (
    KEEP_BEST,
    KEEP_MODEL,
    PLACEHOLDER,
    describe_slowest,
    list_step_figures,
    list_time_figures,
)
from shardscope_widgets.run.recording_panel import RecordingPanel
from shardscope_widgets.run.samples import RunSamples

POLL_SECONDS = 0.25
GPU_SECONDS = 1.0
"""Seconds between reads of data that changes slowly: GPU samples and engine records."""
READ_SECONDS = 0.15
"""Time limit for reading a long run's metrics before the first drawing; the rest is read afterwards."""
MAX_READS = 20
"""Reads of a run's metrics before its page is written: an active run may log faster than it is read."""
SHARE_OF_KERNEL = 0.1
"""Fraction of a CPU core that a view may use for drawing: charts of many ranks are drawn less often."""
MAX_PAUSE_SECONDS = 2.0
"""Maximum seconds between two drawings, however long one takes."""
SECOND_STOP_SECONDS = 3.0
"""Time after which a second "Stop" ends a run that still writes its trace."""
STOP_TOOLTIP, CANCEL_TOOLTIP = "End this run", "Take this job out of the queue"
LOST_TOOLTIP = "End this run, if it is still active on its machine"
SAVE_TOOLTIP = "Finish the current step, save a checkpoint and end this run"
FINISH_TOOLTIP = (
    "Finish the current step, validate, and export the weights with the lowest validation loss: the run "
    "ends as a complete one"
)
FINISH_LAST_TOOLTIP = "Finish the current step and export its weights: the run ends as a complete one"
SHOULD_STOP_TOOLTIP = "Set ctx.should_stop: the task ends by itself, and its own code decides what it saves"
NO_RUN = "No run yet. A run that you launch or open appears here."


class RunView(View):
    """A live view of ``run``, read from its folder at most four times a second; a run can have many views.

    ``on_end(run)`` is called once the run has ended and everything that it logged is drawn; ``on_open_trace``
    shows a run's newest trace. ``samples_first`` shows samples above the charts.
    """

    status = traitlets.Unicode("", help="The run's status as last shown.").tag(sync=False)
    num_steps = traitlets.Int(0, help="Steps that rank 0 has logged.").tag(sync=False)

    def __init__(
        self,
        run: ss.Run | None = None,
        *,
        on_end: Callable[[ss.Run], None] | None = None,
        on_open_trace: Callable[[ss.Run], None] | None = None,
        samples_first: bool = False,
    ) -> None:
        self.run: ss.Run | None = None
        self._on_end, self._on_open_trace = on_end, on_open_trace
        self._lock = threading.RLock()
        self._is_watching = False
        """Whether a thread is about to refresh the view again."""
        self._left = threading.Event()
        """Set when the view is closed or shows another run, or the same one again: a new one for each."""
        self._follow: Follow | None = None
        self._pace = Pace()
        self._expected: PredictedMetrics | None = None
        self._latest: dict[int, dict[str, object]] = {}
        self._nodes: list[RunNode] = []
        """The nodes of a scheduler's run, which have their names once they have started."""
        self._has_node_names = True
        self._attempt = 1
        """The attempt whose nodes are shown."""
        self._shown_status: tuple[str, str, int] = ("", "", 0)
        self._stop_requested = self._finish_requested = False
        self._stop_pressed = 0.0
        self._sampled = 0.0
        self._gpu_time = 0.0
        # The number of columns of charts depends on the width, which only the browser knows.
        self._sheet = Sheet("run", measures=True)
        self._sheet.observe(lambda _: self._fit_width(), "width")
        self.head = controls.create_html()
        buttons = self._create_buttons()
        self.progress = controls.create_html("", "ss-run-progress")
        self.facts = controls.create_html()
        # Created with the first run: a FigureWidget sends 5 MB of front end, which planning does not need.
        self.figure: RunFigure | None = None
        self.legend = controls.create_html()
        self._figure_place = widgets.VBox(layout=widgets.Layout())
        self.recording: RecordingPanel | None = None
        self._recording_place = widgets.VBox(layout=controls.share_layout())
        # Filled when the run has ended with adapters.
        self.model_place = widgets.VBox(layout=controls.share_layout())
        self._merging: dict[Path, ModelPanel] = {}
        """Panels of other runs whose adapters are being merged."""
        self.samples = RunSamples()
        self.memory = RunMemory()
        self.engine = controls.create_html()
        self.error = controls.create_html("", "ss-run-error")
        self.logs = RunLog(on_change=self._refresh_log)
        self.logs.add_class("ss-run-log")
        self.table = controls.create_html()
        top = widgets.HBox([self.head, buttons], layout=controls.share_layout())
        top.add_class("ss-run-top")
        # The log comes before parts that appear after some steps, so that it does not move.
        answers = [self._figure_place, self.samples.html]
        if samples_first:
            answers.reverse()
        parts = [self.error, self.model_place, self.facts, *answers, self.table]
        self._body = widgets.VBox(
            [*parts, self.logs, self._recording_place, self.memory.html, self.engine],
            layout=widgets.Layout(display="none"),
            tabbable=True,
        )
        self._body.add_class("ss-run-body")
        super().__init__([self._sheet, top, self.progress, self._body])
        self.add_class("ss-root")
        self.add_class("ss-run")
        if run is not None:
            self.show(run)
        else:
            self.head.value = f"<span class='ss-hint'>{NO_RUN}</span>"
            self.stop_button.add_class("ss-off")

    def _create_buttons(self) -> widgets.HBox:
        """Return the buttons that end the run, which the view shows and enables by its state."""
        # A layout of its own, not a shared one: tasks that read no stop requests hide the button.
        self.save_button = controls.create_button(
            "Save and stop", "ss-ghost", tooltip=SAVE_TOOLTIP, layout=widgets.Layout(display="none")
        )
        self.save_button.on_click(lambda _: self._press_run_button("Save and stop"))
        self.finish_button = controls.create_button(
            KEEP_BEST,
            "ss-ghost",
            tooltip=FINISH_TOOLTIP,
            layout=widgets.Layout(display="none"),
            disabled=True,
        )
        self.finish_button.on_click(lambda _: self._press_finish())
        # Disabled until the first refresh has read whether the run is still active.
        self.stop_button = controls.create_button("Stop", "ss-ghost", tooltip=STOP_TOOLTIP, disabled=True)
        self.stop_button.on_click(lambda _: self._press_run_button("Stop"))
        # They never shrink: a long plan in the heading is truncated instead.
        return widgets.HBox(
            [self.finish_button, self.save_button, self.stop_button],
            layout=controls.share_layout(flex="0 0 auto"),
        )

    def show(self, run: ss.Run) -> None:
        """Switch the view to ``run``."""
        self._check_shown(run, ss.Run)
        with self._lock:
            self.run = run
            self._left.set()
            self._left = threading.Event()
            # A new reader and a new pace: they would otherwise continue with the previous run's records.
            self._follow = run.follow()
            self._pace = Pace()
            self._expected = run.predicted_metrics()
            self._latest = {}
            self._attempt = RunFolder(run.folder).attempt
            self._nodes = run.nodes
            self._has_node_names = not self._nodes
            self._shown_status = ("", "", 0)
            self._stop_requested = self._finish_requested = False
            self._sampled = self._gpu_time = 0.0
            self.num_steps = 0
            if self.figure is None:
                self.figure = RunFigure()
                self._figure_place.children = [self.legend, self.figure.widget]
                self.recording = RecordingPanel(self._on_open_trace)
                self._recording_place.children = [self.recording]
            assert self.recording is not None, "both are created together"
            self.recording.start_run(run)
            # A training task logs these for certain: their empty charts are shown at once, so that nothing
            # moves later. The metrics of a user's function are unknown until they arrive.
            trained = [panel.metric for panel in TRAINING_PANELS] if run.trains_the_plan else []
            if trained and (run.task_fields or {}).get("validation") is not None:
                trained.append(VALIDATION_PANEL.metric)
            self.figure.fit_width(self._sheet.width)
            self.figure.start_run(run.world_size, self._expected, run.num_steps, trained)
            self.legend.value = run_html.render_legend(run.world_size)
            self.samples.start_run(run)
            self.memory.start_run(run)
            self.logs.start_run(run)
            self._figure_place.layout.display = ""
            self._body.layout.display = ""
            self._body.remove_class("ss-run-failed")
            self._leave_model()
            self._offer_saving(run)
            # Immediately: the view would name the previous run until its thread has read the folder.
            self.head.value = run_html.render_heading(run, run.status)
            for part in (self.error, self.engine, self.table, self.progress, self.facts):
                part.value = ""
            self._start_watching()

    def close(self) -> None:
        """Close the view; the run and its other views continue."""
        with self._lock:  # Wait until the view's thread has finished drawing.
            self.run = None
            self._left.set()
            for panel in self._merging.values():
                panel.close()
            self.legend.close()  # It has a place in the view only once a run was shown.
            super().close()

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the run as it is now as one page that works from disk; return its path."""
        # A script writes the page at once, before the view's thread has read the run.
        for _ in range(MAX_READS):
            if not self.refresh():
                break
        return super().to_html(path)

    def refresh(self) -> bool:
        """Read new data in the run's folder and draw it. Return whether there is more to read."""
        with self._lock:
            run, follow = self.run, self._follow
            if run is None or follow is None:
                return False
            # Buttons and status first, so that the run can be seen and stopped whatever a task logs.
            status = run.status
            has_ended = status in FINAL
            can_stop = _can_stop(run, status)
            if self._stop_requested and status == "stopping" and is_recording(run):
                # Not at once: the second click of a double click would end the run without its trace.
                self._stop_requested = time.monotonic() - self._stop_pressed < SECOND_STOP_SECONDS
            self.stop_button.disabled = not can_stop or self._stop_requested
            self.save_button.disabled = status not in ("starting", "running")
            self.finish_button.disabled = self.save_button.disabled or self._finish_requested
            controls.show_if(self.stop_button, can_stop)
            # A job that waits has nothing to save.
            for button in (self.save_button, self.finish_button):
                controls.show_if(button, not has_ended and status != "queued")
            self.status = status
            self._name_stop_button(status)
            self._show_status(run, status)
            if has_ended and not self.model_place.children and has_adapters(run):
                self.model_place.children = [self._merging.pop(run.folder, None) or ModelPanel(run)]
            more, sampled = self.logs.refresh(has_ended), self._sampled
            new = _read_new_records(follow)
            self._read_slow_parts(run, has_ended)
            if new or has_ended:
                self._add_records(run, new)
            if self._sampled != sampled:
                self.samples.refresh(run)
            self._show_numbers(run, has_ended)
            return more or follow.is_behind

    def _leave_model(self) -> None:
        """Remove the panel of the previous run's model; one that is merging comes back with its run."""
        for panel in self.model_place.children:
            assert isinstance(panel, ModelPanel)
            if panel.work.is_busy:
                self._merging[panel.run.folder] = panel
            else:
                panel.close()
        self.model_place.children = []

    def _offer_saving(self, run: ss.Run) -> None:
        """Show "Save and stop" if the task supports it; for a user's function, once it has checked for it."""
        self.save_button.tooltip = SAVE_TOOLTIP if run.trains_the_plan else SHOULD_STOP_TOOLTIP
        self.save_button.layout.display = "" if run.reads_stop_requests else "none"
        self.finish_button.description = KEEP_BEST if run.keeps_best else KEEP_MODEL
        self.finish_button.tooltip = FINISH_TOOLTIP if run.keeps_best else FINISH_LAST_TOOLTIP
        self.finish_button.layout.display = "" if run.keeps_a_model else "none"

    def _name_stop_button(self, status: str) -> None:
        """Call the button Cancel while the job waits: nothing of it has started yet."""
        self.stop_button.description = "Cancel" if status == "queued" else "Stop"
        tooltips = {"queued": CANCEL_TOOLTIP, "lost": LOST_TOOLTIP}
        self.stop_button.tooltip = tooltips.get(status, STOP_TOOLTIP)

    def _add_records(self, run: ss.Run, new: list[dict[str, object]]) -> None:
        """Add new records to the numbers and the charts."""
        self._pace.add(new)
        # Samples have the steps before them, which they find from the steps as logged.
        self.samples.add_records(new)
        if run.trains_the_plan:
            new = [_count_from_one(record) for record in new]
        for record in new:
            if isinstance(rank := record.get("rank"), int):
                # A record may contain only some of the metrics: the others keep their last value.
                last = self._latest.setdefault(rank, {})
                last.update(
                    {name: value for name, value in record.items() if name in last or len(last) < MAX_NAMES}
                )
        self.num_steps += sum(1 for record in new if record.get("rank") == 0 and "loss" in record)
        if self.figure is not None:
            self.figure.add_records(new)

    def _read_slow_parts(self, run: ss.Run, has_ended: bool) -> None:
        """Read data that changes slowly: GPU samples and engine records."""
        now = time.monotonic()
        if now - self._sampled < GPU_SECONDS and not has_ended:
            return
        self._sampled = now
        attempt = RunFolder(run.folder).attempt
        if attempt != self._attempt:  # The job was started again, perhaps on other nodes.
            self._attempt, self._has_node_names = attempt, False
        if not self._has_node_names:
            self._nodes = run.nodes
            self.logs.set_nodes(self._nodes)
            # The clocks are known when the ranks have begun.
            has_begun = bool(self._latest) or has_ended
            self._has_node_names = has_begun and all(node.folder.node_json.exists() for node in self._nodes)
            self._pace.seconds_ahead = {
                rank: node.clock_seconds for node in self._nodes if node.clock_seconds for rank in node.ranks
            }
        samples = run.gpu_samples()
        # The latest sample of each rank; those of several nodes come one after another.
        for rank, record in {int(record["rank"]): record for record in samples}.items():
            self._latest.setdefault(rank, {}).update(_select_metrics(record))
        if self._expected is None:  # For a user's function the prediction is known once its model is.
            self._expected = run.predicted_metrics()
        if self.figure is not None:
            self.figure.set_expected(self._expected)
            self.figure.set_total_steps(run.num_steps)
            # All samples are redrawn, which is skipped until there is a newer one.
            if samples and samples[-1]["time"] != self._gpu_time:
                self._gpu_time = samples[-1]["time"]
                self.figure.show_gpu_samples(samples, samples[0]["time"])
        self._offer_saving(run)
        if self.recording is not None:
            self.recording.refresh(run, self.status)
        # The engine record and the measured memory are in the same file of each rank.
        self.engine.value = _render_engine(self.memory.refresh(run, self._latest))

    def _start_watching(self) -> None:
        self._is_watching = True
        threading.Thread(
            target=self._watch_run, args=(self.run, self._left), daemon=True, name="shardscope-run-view"
        ).start()

    def _watch_run(self, run: ss.Run, left: threading.Event) -> None:
        """Refresh in a thread until the run ends, because cells may block the kernel's main thread.

        It returns at once when ``left`` is set: another thread may watch the same run.
        """
        ended, more = False, False
        try:
            while not left.is_set() and (more or not ended):
                # CPU time, not wall time: waiting for the disk does not slow down the user's cells.
                started, busy = time.monotonic(), time.thread_time()
                # Read the status before the refresh, which then draws everything written up to the end.
                ended = run.status in FINAL
                try:
                    more = self.refresh()
                except Exception as error:  # The folder may vanish: the view reports that and continues.
                    more = False
                    self.error.value = _render_alert(f"The run cannot be shown: {error}")
                if not ended:
                    pause = min((time.thread_time() - busy) / SHARE_OF_KERNEL, MAX_PAUSE_SECONDS)
                    left.wait(max(0.02, max(POLL_SECONDS, pause) - (time.monotonic() - started)))
        finally:
            with self._lock:
                is_current = not left.is_set()
                if is_current:
                    self._is_watching = False
            if is_current:
                # The user may have started a search since the last refresh; on_end may take long.
                self._refresh_log()
                if self._on_end is not None:
                    self._on_end(run)

    def _refresh_log(self) -> None:
        """Refresh after the user changed the log or search, unless a watching thread does so anyway."""
        with self._lock:
            # Two threads would read the same search twice.
            if self.run is None or self._is_watching:
                return
            self._is_watching = True
            threading.Thread(
                target=self._finish_search, args=(self._left,), daemon=True, name="shardscope-run-log"
            ).start()

    def _finish_search(self, left: threading.Event) -> None:
        """Refresh until a search has read the whole log of an ended run.

        It returns at once when ``left`` is set: another thread watches the run that is shown then.
        """
        more = True
        while more:
            started = time.monotonic()
            with self._lock:
                if left.is_set():
                    return
                # A caller of _refresh_log waits here, and starts another thread if this was the last refresh.
                more = False
                try:
                    more = self.refresh()
                except Exception as error:  # The folder may be gone by now.
                    self.error.value = _render_alert(f"The run cannot be shown: {error}")
                finally:
                    self._is_watching = more
            if more:
                left.wait(max(0.0, POLL_SECONDS - (time.monotonic() - started)))

    def _fit_width(self) -> None:
        with self._lock:
            if self.figure is not None:
                self.figure.fit_width(self._sheet.width)

    def _press_run_button(self, button: Button) -> None:
        # A click may arrive after the one that has disabled the button.
        if self.run is None or self._stop_requested:
            return
        # "Stop" is still possible after "Save and stop" (saving may take long), and after a "Stop" that waits
        # for the trace of a recording.
        # Disabled at once: the status changes only when the supervisor has read the request.
        self._stop_requested, self._stop_pressed = button == "Stop", time.monotonic()
        self.save_button.disabled = True
        self.stop_button.disabled = self._stop_requested
        try:
            self.run.press(button)
        except OSError as error:
            self._stop_requested = self.stop_button.disabled = False
            self.error.value = _render_alert(str(error))

    def _press_finish(self) -> None:
        if self.run is None:
            return
        self._finish_requested = self.finish_button.disabled = True
        try:
            self.run.finish()
        except OSError as error:
            self._finish_requested = False
            self.error.value = _render_alert(str(error))

    def _show_status(self, run: ss.Run, status: str) -> None:
        """Show status, reason and plan; for a failed run, its error and the log of the failed rank."""
        current = (status, run.reason, RunFolder(run.folder).attempt)
        # Writing the same HTML again would lose the user's text selection.
        if current == self._shown_status:
            return
        self._shown_status = current
        self.head.value = run_html.render_heading(run, status)
        note = f"<div class='ss-note'>{escape(run.note)}</div>" if run.note else ""
        failure = run.error if status == "failed" else None
        self.error.value = note + (
            "<pre class='ss-log ss-error' role='alert' tabindex='0' aria-label='error of the run'>"
            f"{escape(failure)}</pre>"
            if failure
            else ""
        )
        if status == "failed":
            self._body.add_class("ss-run-failed")
            # The rank that failed first has the cause in its log; the others log the consequences.
            first = find_first_failure(RunFolder(run.folder), run.world_size)
            if first is not None:
                self.logs.prefer_log(LAUNCHER if first.rank is None else first.rank)

    def _show_numbers(self, run: ss.Run, has_ended: bool) -> None:
        """Show progress, figures and the table of latest values, with dashes for numbers still to come."""
        slowest = self._pace.slowest
        last = self._pace.last_step
        done = 0 if last is None else last + 1
        total = run.num_steps
        _update_html(self.progress, run_html.render_progress_bar(done, total) if total else "")
        is_known = run.trains_the_plan
        entries = [
            *list_step_figures(run, self._pace, self._latest.get(0, {}), self.status),
            *list_time_figures(run, self._pace, has_ended),
        ]
        if self._follow is not None and self._follow.num_skipped_bytes:
            entries.append(run_html.describe_sample(self._follow))
        if slowest is not None:
            entries += describe_slowest(slowest, self._pace, self._nodes)
        elif is_known and run.world_size > 1:
            entries.append((PLACEHOLDER, "slowest rank", "Known after some steps"))
        _update_html(self.facts, run_html.render_figures(entries))
        charts = self.figure.charts if self.figure is not None else {}
        # Rows of dashes until the first numbers, so that the content below does not move.
        waits = is_known and not has_ended and not self._latest
        latest = {rank: {} for rank in range(run.world_size)} if waits else self._latest
        _update_html(
            self.table, run_html.render_latest_table(latest, charts, self._expected, slowest, self._nodes)
        )
        # A run that ended before its first step: empty charts would push its error out of sight.
        is_empty = has_ended and self.figure is not None and not self.figure.has_lines
        self._figure_place.layout.display = "none" if is_empty else ""


def _can_stop(run: ss.Run, status: str) -> bool:
    """Return whether a stop may have an effect.

    A run that counts as lost may still be active on another machine; on this one its processes are gone.
    """
    if status == "lost":
        return bool(run.target) or not run.is_on_this_machine
    return status not in FINAL


def _read_new_records(follow: Follow) -> list[dict[str, object]]:
    """Return new data; for a long run that is opened late, as much as a short time allows."""
    began = time.monotonic()
    new = follow.read()
    while follow.is_behind and time.monotonic() - began < READ_SECONDS:
        new += follow.read()
    return new


def _update_html(widget: widgets.HTML, html: str) -> None:
    """Update only on changes: writing the same value again would lose the user's text selection."""
    if widget.value != html:
        widget.value = html


def _count_from_one(record: dict[str, object]) -> dict[str, object]:
    """Return a record of our own loop, which logs its first step as 0, as users count: from 1."""
    step = record.get("step")
    return {**record, "step": step + 1} if is_number(step) else record


def _select_metrics(record: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in record.items() if name not in ("time", "rank", "node", "gpu")}


def _render_engine(engine: object) -> str:
    """Return one sentence about what the engine of rank 0 built."""
    sentence = engine.get("sentence") if isinstance(engine, dict) else None
    return f"<div class='ss-hint'>As built on rank 0: {escape(str(sentence))}</div>" if sentence else ""


def _render_alert(message: str) -> str:
    return f"<div class='ss-error' role='alert'>{escape(message)}</div>"
