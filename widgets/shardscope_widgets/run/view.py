"""One run while it happens and afterwards: status, progress, charts, memory, logs, and the way to stop it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as widgets
import traitlets

import shardscope as ss
from shardscope.runs.expected import Expected
from shardscope.runs.follow import Follow
from shardscope.runs.pace import Pace
from shardscope.runs.stopping import Button
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.numbers import short
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
from shardscope_widgets.run import words as run_words
from shardscope_widgets.run.figure import RunFigure
from shardscope_widgets.run.log import RunLog
from shardscope_widgets.run.memory import RunMemory
from shardscope_widgets.run.panels import MAX_NAMES, TRAINING, is_number

POLL_SECONDS = 0.25
CARD_SECONDS = 1.0
"""Cards, and what engines recorded, are looked at so often."""
READ_SECONDS = 0.15
"""What a run has logged already is read for so long before it is drawn, and then read on."""
SHARE_OF_KERNEL = 0.1
"""Of a processor's time that a view may take for drawing: charts of many ranks are drawn less often."""
MOST_SECONDS = 2.0
"""Between two drawings, whatever one takes."""
SAVES = "Finish the step, save a checkpoint, end this run"
LOOKS = "Ask the task, which looks at ctx.should_stop, to end by itself; what it saves is its own code's"
ENDED = ("finished", "stopped", "failed", "lost")


class RunView(View):
    """Shows ``run`` live, at most four times a second, from its folder alone: any number may watch."""

    status = traitlets.Unicode("", help="The run's status as last shown.").tag(sync=False)
    num_steps = traitlets.Int(0, help="Steps that rank 0 has logged.").tag(sync=False)

    def __init__(self, run: ss.Run | None = None, *, on_end: Callable[[ss.Run], None] | None = None) -> None:
        self.run: ss.Run | None = None
        self._on_end = on_end
        self._lock = threading.RLock()
        self._is_watching = False
        """Whether some thread is going to look once more."""
        self._follow: Follow | None = None
        self._pace = Pace()
        self._expected: Expected | None = None
        self._latest: dict[int, dict[str, Any]] = {}
        self._said: tuple[str, str] = ("", "")
        self._stop_asked = False
        self._looked = 0.0
        self._card_time = 0.0
        self._sheet = Sheet("run", measures=True)
        self._sheet.observe(lambda _: self._fit(), "width")
        self.head = controls.html()
        self.save_button = controls.button(
            "Save and stop",
            "ss-ghost",
            tooltip=SAVES,
            layout=widgets.Layout(display="none"),
        )
        self.save_button.on_click(lambda _: self._press("Save and stop"))
        self.stop_button = controls.button("Stop", "ss-ghost", tooltip="End this run", disabled=True)
        self.stop_button.on_click(lambda _: self._press("Stop"))
        self.progress = controls.html()
        self.facts = controls.html()
        # Made with the first run: a FigureWidget sends 5 MB of front end, which planning alone does not need.
        self.figure: RunFigure | None = None
        self._figure_place = widgets.VBox(layout=controls.layout())
        self.memory = RunMemory()
        self.what = controls.html()
        self.error = controls.html()
        self.logs = RunLog(on_change=self._wake)
        self.table = controls.html()
        buttons = widgets.HBox([self.save_button, self.stop_button], layout=controls.layout(flex="0 0 auto"))
        top = widgets.HBox([self.head, buttons], layout=controls.layout())
        top.add_class("ss-run-top")
        charts = [self.progress, self.facts, self._figure_place, self.table]
        self._of_a_run = widgets.VBox(
            [*charts, self.memory.html, self.what, self.logs], layout=widgets.Layout(display="none")
        )
        super().__init__([self._sheet, top, self.error, self._of_a_run])
        self.add_class("ss-root")
        self.add_class("ss-run")
        if run is not None:
            self.show(run)
        else:
            self.head.value = (
                "<span class='ss-hint'>No run yet: one that is started shows itself here.</span>"
            )

    def show(self, run: ss.Run) -> None:
        """Watch ``run`` from now on."""
        with self._lock:
            self.run = run
            self._follow = run.follow()
            self._pace = Pace()
            self._expected = run.expected()
            self._latest = {}
            self._said = ("", "")
            self._stop_asked = False
            self._looked = self._card_time = 0.0
            self.num_steps = 0
            if self.figure is None:
                self.figure = RunFigure()
                self._figure_place.children = [self.figure.widget]
            trained = [panel.metric for panel in TRAINING] if run.trains_the_plan else []
            self.figure.fit(self._sheet.width)
            self.figure.start(run.world_size, self._expected, run.num_steps, trained)
            self.memory.start(run)
            self.logs.start(run)
            self._of_a_run.layout.display = ""
            self._offer_saving(run)
            for part in (self.error, self.what, self.table, self.progress, self.facts):
                part.value = ""
            self._watch_from_now()

    def close(self) -> None:
        """Close the view. The run goes on, and other views of it too."""
        with self._lock:  # Not while its thread draws.
            self.run = None
            super().close()

    def refresh(self) -> bool:
        """Read what is new in the run's folder and draw it; whether there is more to read."""
        with self._lock:
            run, follow = self.run, self._follow
            if run is None or follow is None:
                return False
            # Stop and status first: whatever a task logs, a run can be seen and stopped.
            status = run.status
            has_ended = status in ENDED
            self.stop_button.disabled = has_ended or self._stop_asked
            self.save_button.disabled = status not in ("starting", "running")
            self.status = status
            more = self.logs.refresh(has_ended)
            self._say_status(run, status)
            new = _read(follow)
            self._look_beside(run, has_ended)
            if new or has_ended:
                self._take(new)
            self._say_numbers(run, has_ended)
            return more or follow.is_behind

    def _offer_saving(self, run: ss.Run) -> None:
        """Of a task of one's own it is known only once its ranks have looked whether a stop was asked."""
        self.save_button.tooltip = SAVES if run.trains_the_plan else LOOKS
        self.save_button.layout.display = "" if run.looks_for_stop else "none"

    def _take(self, new: list[dict[str, Any]]) -> None:
        self._pace.add(new)
        for record in new:
            if isinstance(rank := record.get("rank"), int):
                # A line may have only some of the metrics: the others keep their last.
                last = self._latest.setdefault(rank, {})
                last.update(
                    {name: value for name, value in record.items() if name in last or len(last) < MAX_NAMES}
                )
        self.num_steps += sum(1 for record in new if record.get("rank") == 0 and "loss" in record)
        if self.figure is not None:
            self.figure.extend(new)

    def _look_beside(self, run: ss.Run, has_ended: bool) -> None:
        """What changes slowly: the cards, and what engines really made."""
        now = time.monotonic()
        if now - self._looked < CARD_SECONDS and not has_ended:
            return
        self._looked = now
        cards = run.cards()
        for record in cards[-run.world_size :]:
            self._latest.setdefault(record["rank"], {}).update(_answers(record))
        if self._expected is None:  # Of a task of one's own it is known once its model is.
            self._expected = run.expected()
        if self.figure is not None:
            self.figure.expect(self._expected)
            if cards and cards[-1]["time"] != self._card_time:
                self._card_time = cards[-1]["time"]
                self.figure.show_cards(cards, cards[0]["time"])
        self._offer_saving(run)
        engine = self.memory.refresh(run, self._latest)
        self.what.value = _what_it_was(engine)

    def _watch_from_now(self) -> None:
        self._is_watching = True
        threading.Thread(
            target=self._watch, args=(self.run,), daemon=True, name="shardscope-run-view"
        ).start()

    def _watch(self, run: ss.Run) -> None:
        """Runs in a thread of its own: cells may block the kernel's main thread at any time."""
        ended, more = False, False
        try:
            while self.run is run and (more or not ended):
                started, busy = time.monotonic(), time.thread_time()
                # Asked before the refresh: what was written up to the end is then drawn by it.
                ended = run.status in ENDED
                try:
                    more = self.refresh()
                except Exception as error:  # the folder may vanish under way: the view says so and lives on
                    more = False
                    self.error.value = _alert(f"This view cannot show the run: {error}")
                if not ended:
                    pause = min((time.thread_time() - busy) / SHARE_OF_KERNEL, MOST_SECONDS)
                    time.sleep(max(0.02, max(POLL_SECONDS, pause) - (time.monotonic() - started)))
        finally:
            with self._lock:
                self._is_watching = False
            if self.run is run:
                # What was asked of a log since the last look; telling of the end may take long.
                self._wake()
                if self._on_end is not None:
                    self._on_end(run)

    def _wake(self) -> None:
        """Something else of a log is asked for: a thread that still watches sees that by itself."""
        with self._lock:
            if self.run is None or self._is_watching:
                return
            self._is_watching = True
            threading.Thread(target=self._search_on, daemon=True, name="shardscope-run-log").start()

    def _search_on(self) -> None:
        more = True
        while more:
            started = time.monotonic()
            with self._lock:
                # Who asks while this looks waits, and then starts a thread anew if this was the last look.
                try:
                    more = self.run is not None and self.refresh()
                finally:
                    self._is_watching = more
            if more:
                time.sleep(max(0.0, POLL_SECONDS - (time.monotonic() - started)))

    def _fit(self) -> None:
        with self._lock:
            if self.figure is not None:
                self.figure.fit(self._sheet.width)

    def _press(self, button: Button) -> None:
        if self.run is None:
            return
        # After one that saves first, a plain one is still possible: saving may take long.
        self._stop_asked |= button == "Stop"
        self.save_button.disabled = True
        self.stop_button.disabled = self._stop_asked
        try:
            self.run.press(button)
        except OSError as error:
            self._stop_asked = False
            self.error.value = _alert(str(error))

    def _say_status(self, run: ss.Run, status: str) -> None:
        said = (status, run.reason)
        if said == self._said:
            return
        self._said = said
        self.head.value = run_words.status_words(run, status)
        note = f"<div class='ss-note'>{escape(run.note)}</div>" if run.note else ""
        failure = run.error if status == "failed" else None
        self.error.value = note + (
            f"<pre class='ss-log ss-error' role='alert'>{escape(failure)}</pre>" if failure else ""
        )

    def _say_numbers(self, run: ss.Run, has_ended: bool) -> None:
        slowest = self._pace.slowest
        last = self._pace.last_step
        done = 0 if last is None else last + 1
        total = run.num_steps
        _put(self.progress, run_words.progress(done, total) if total else "")
        own = self._latest.get(0, {})
        entries = []
        if last is not None:
            goal = f" of {total:,}" if total else ""
            noun = "step" if (total or done) == 1 else "steps"
            entries.append((f"{done:,}{goal}", noun, "Up to the last that any rank has logged"))
        if is_number(own.get("loss")):
            entries.append((f"{own['loss']:.3f}", "loss", "Of rank 0, in the last step"))
        for name, words in (("tokens_per_second_all_ranks", "all ranks"), ("tokens_per_second", "of rank 0")):
            if is_number(own.get(name)):
                entries.append((short(own[name]), f"tokens/s, {words}", "In the last step"))
                break
        left = self._pace.seconds_left(total, time.time()) if total and not has_ended else None
        if left is not None:
            why = "The steps that are left, at the pace of the last ones"
            entries.append((f"about {run_words.seconds_words(left)}", "to go", why))
        elif has_ended and (took := _took(run)) is not None:
            entries.append((run_words.seconds_words(took), "in all", "From its launch to its end"))
        if slowest is not None:
            entries.append(run_words.slowest_words(slowest))
        _put(self.facts, run_words.facts(entries))
        charts = self.figure.charts if self.figure is not None else {}
        _put(self.table, run_words.latest_table(self._latest, charts, self._expected, slowest))


def _read(follow: Follow) -> list[dict[str, Any]]:
    """What is new; of a long run that is opened late as much as can be read in a moment."""
    began = time.monotonic()
    new = follow.read()
    while follow.is_behind and time.monotonic() - began < READ_SECONDS:
        new += follow.read()
    return new


def _put(place: widgets.HTML, words: str) -> None:
    """Only what changed: a browser that writes the same anew loses what is marked in it."""
    if place.value != words:
        place.value = words


def _answers(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("time", "rank", "gpu")}


def _took(run: ss.Run) -> float | None:
    times = [record["time"] for record in run.history if is_number(record["time"])]
    return times[-1] - times[0] if len(times) > 1 else None


def _what_it_was(engine: object) -> str:
    """One sentence on what the engine of rank 0 really made."""
    words = engine.get("sentence") if isinstance(engine, dict) else None
    return f"<div class='ss-hint'>What it really was: {escape(str(words))}</div>" if words else ""


def _alert(message: str) -> str:
    return f"<div class='ss-error' role='alert'>{escape(message)}</div>"
