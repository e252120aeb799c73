"""The runs in ``./runs``: a list to open, compare, resume and stop them, and to open their traces."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path

import ipywidgets as widgets
import traitlets

import shardscope as ss
from shardscope.records.folder import FINAL
from shardscope.runs.explain.compare import Runs
from shardscope.runs.launch.free_memory import TooLittleFreeError
from shardscope.runs.resume import resume_run
from shardscope.runs.summaries import RunSummaries, RunSummary, find_run_folders
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_calls import call_in_thread, try_call
from shardscope_widgets.kit.clickable import Clickable, IgnoredError
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
from shardscope_widgets.run.comparison import ComparisonView
from shardscope_widgets.run.runs_table import make_printable, render_runs_table
from shardscope_widgets.run.view import RunView

FOLDER = "runs"
"""Folder into which ``launch`` puts runs, relative to the notebook."""
PAGE_ROWS = 20
READ_SECONDS = 2.0
"""Seconds between reads of the folder while one of its runs is active."""
TRACE_PIXELS = 440
SUBMITTING = "The job is being submitted again."
IS_BUSY = "Another run is active: wait until it ends, or stop it."
HINT = "Select two runs to compare them."


def count_runs() -> int:
    """Return the number of runs in the folder, including damaged ones; 0 if it cannot be read."""
    try:
        return sum(1 for _ in find_run_folders(Path(FOLDER)))
    except OSError:
        return 0


class RunsView(View):
    """The list of runs in ``./runs``, active ones first; one run, or two side by side, can replace the list.

    ``on_open_trace(run)`` shows the trace of a run; without it the trace opens in this view. ``on_end(run)``
    is called when a run that was active when opened has ended. ``on_resume(run)`` is called with the run that
    Resume launched, after it is shown here.
    """

    num_runs = traitlets.Int(0, help="Runs in the folder, damaged ones included.").tag(sync=False)

    def __init__(
        self,
        on_open_trace: Callable[[ss.Run], None] | None = None,
        on_end: Callable[[ss.Run], None] | None = None,
        on_resume: Callable[[ss.Run], None] | None = None,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create the view. ``is_busy`` returns whether an active run would compete with a resumed one."""
        self._is_busy = is_busy
        self._resumed: ss.Run | None = None
        """The latest run launched by Resume."""
        self._is_submitting = False
        """Whether a scheduler is being asked to resume a run."""
        self._on_open_trace, self._on_end, self._on_resume = on_open_trace, on_end, on_resume
        self._summaries = RunSummaries(FOLDER)
        self._rows: dict[str, RunSummary] = {}
        """Rows by the key that their buttons send."""
        self._selected: list[str] = []
        self._num_shown = PAGE_ROWS
        self._message = ""
        self._force: str | None = None
        """The key of a run that can be resumed in spite of too little free memory."""
        self._awaited: dict[Path, ss.Run] = {}
        """Runs that were active when opened, by folder, until ``on_end`` is called."""
        self._lock = threading.RLock()
        self._is_watching = False
        # The list: a row of controls, the table in a scrolling box, and a row that shows more.
        self.toolbar = Clickable(self._handle_action, "ss-runs-bar")
        self.table = Clickable(self._handle_action)
        self.more = Clickable(self._handle_action, "ss-runs-more")
        scroll = widgets.VBox([self.table, self.more], layout=controls.share_layout(), tabbable=True)
        scroll.add_class("ss-runs-scroll")
        self._list = widgets.VBox([self.toolbar, scroll], layout=widgets.Layout())
        # One run, two runs or a trace, below a row with the back button.
        self.bar = Clickable(self._handle_action, "ss-runs-bar")
        self.run_view = RunView(on_end=self._run_ended, on_open_trace=self._open_trace)
        self.comparison = ComparisonView()
        self._trace_place = widgets.VBox(layout=widgets.Layout(display="none"))
        self._page = widgets.VBox(
            [self.bar, self.run_view, self.comparison, self._trace_place],
            layout=widgets.Layout(display="none"),
        )
        super().__init__([Sheet("run"), self._list, self._page])
        controls.add_classes(self, "ss-root", "ss-runs-view")
        self.read_folder()

    # ---- public methods

    def read_folder(self) -> None:
        """Read ``./runs`` again and show the changes; safe to call from any thread at any time."""
        with self._lock:
            if self.comm is None:  # The view was closed.
                return
            try:
                summaries = self._summaries.read()
            except OSError as error:
                self._set_message(f"The folder {FOLDER} cannot be read: {error}")
                summaries = []
            self._rows = {_make_key(summary.name): summary for summary in summaries}
            self._selected = [key for key in self._selected if key in self._rows]
            self.num_runs = len(summaries)
            self._draw_list()
            self._start_watching()

    def open(self, run: ss.Run | None = None) -> None:
        """Show ``run`` in place of the list.

        Without a run this is ``Widget.open`` of ipywidgets, which connects the widget to its page.
        """
        if run is None:
            super().open()
            return
        with self._lock:
            # on_end reports only runs that end while the user watches, not runs that had ended before.
            if run.status not in FINAL:
                self._awaited[run.folder] = run
            self._show_page(self.run_view)
            self.run_view.show(run)
            self._draw_bar()
            self._start_watching()

    def show_list(self) -> None:
        """Return to the list of all runs."""
        with self._lock:
            self._show_page(None)
        self.read_folder()

    def compare(self, first: ss.Run, second: ss.Run) -> None:
        """Show two runs side by side in place of the list."""
        try:
            self.comparison.show(Runs([first, second]).compare(first, second))
        except Exception as error:  # Keep the list and show the error if either folder cannot be compared.
            self._set_message(f"The runs cannot be compared: {error}")
            self._draw_list()
            return
        with self._lock:
            self._show_page(self.comparison)
            names = " and ".join(f"<b>{escape(make_printable(run.name))}</b>" for run in (first, second))
            self.bar.value = _render_back_row(f"<span class='ss-clipped'>Comparing {names}</span>")

    # ---- drawing

    def _draw_shown(self) -> None:
        """Update the list, or the row above an opened run."""
        (self._draw_list if self.is_list_shown else self._draw_bar)()

    def _draw_list(self) -> None:
        """Update the list; unchanged parts are not sent."""
        shown = dict(list(self._rows.items())[: self._num_shown])
        self.table.value = render_runs_table(shown, self._selected, self._why_not_resume)
        left = len(self._rows) - len(shown)
        self.more.value = (
            f"<button type='button' class='ss-act' data-act='more'>More</button> "
            f"<span class='ss-hint'>{len(shown)} of {len(self._rows):,} runs</span>"
            if left > 0
            else ""
        )
        # aria-disabled instead of disabled: the keyboard still reaches the button and its hint.
        both = len(self._selected) == 2
        off = "" if both else " aria-disabled='true'"
        force = (
            f"<button type='button' class='ss-act' data-act='force:{self._force}'>Resume anyway</button>"
            if self._force
            else ""
        )
        hint = "" if both or not self._rows else HINT
        message = self._render_message() or f"<span class='ss-hint ss-clipped' title='{hint}'>{hint}</span>"
        self.toolbar.value = (
            f"<button type='button' class='ss-act{' ss-first' * both}' data-act='compare'{off}>"
            "Compare</button>"
            f"{message}{force}"
            "<button type='button' class='ss-act ss-refresh' data-act='look' "
            "title='Read the folder again'>Refresh</button>"
        )

    def _draw_bar(self) -> None:
        """Update the row above an opened run: the back button and the actions for the run."""
        run = self.run_view.run
        if run is None:
            return
        key = _make_key(run.name)
        summary = self._rows.get(key)
        acts = ""
        if summary is not None and summary.run is not None and summary.run.folder == run.folder:
            if summary.failed_early:
                reason = self._why_not_resume(summary)
                why = escape(reason or "Launch a run that continues from the last checkpoint", quote=True)
                off = "" if reason is None else " aria-disabled='true'"
                acts += (
                    f"<button type='button' class='ss-act' data-act='resume:{key}' title='{why}'{off}>"
                    "Resume</button>"
                )
            if summary.has_trace and not summary.is_live:
                acts += f"<button type='button' class='ss-act' data-act='trace:{key}'>Open trace</button>"
        if self._force == key:
            acts += f"<button type='button' class='ss-act' data-act='force:{key}'>Resume anyway</button>"
        self.bar.value = _render_back_row(f"{self._render_message()}<span class='ss-bar-acts'>{acts}</span>")

    def _render_message(self) -> str:
        """Return the message of the last action as HTML; empty without one."""
        if not self._message:
            return ""
        text = escape(self._message, quote=True)
        role, kind = ("status", "ss-hint") if self._message == SUBMITTING else ("alert", "ss-error")
        return f"<span class='{kind} ss-clipped' role='{role}' title='{text}'>{text}</span>"

    def _show_page(self, page: widgets.Widget | None) -> None:
        """Show the list, or one of the pages in its place."""
        self._message, self._force = "", None
        self._list.layout.display = "" if page is None else "none"
        self._page.layout.display = "none" if page is None else ""
        for widget in (self.run_view, self.comparison, self._trace_place):
            widget.layout.display = "" if widget is page else "none"
        # A trace may be large: it is freed when another page replaces it.
        if page is not self._trace_place:
            self._close_trace()

    def _set_message(self, message: str, force: str | None = None) -> None:
        self._message, self._force = message, force

    @property
    def is_list_shown(self) -> bool:
        """Return whether the list is visible instead of one of its runs."""
        return bool(self._list.layout.display != "none")

    # ---- button actions

    def _handle_action(self, act: str) -> None:
        kind, _, key = act.partition(":")
        summary = self._rows.get(key)
        run = None if summary is None else summary.run
        # Any other action starts without the message of the one before.
        if kind not in ("back", "look"):
            self._set_message("")
        match kind:
            case "look":
                self._set_message("")
                self.read_folder()
            case "back":
                self.show_list()
            case "more":
                self._num_shown += PAGE_ROWS
                self._draw_list()
            case "compare":
                self._compare_selected()
            case "select" if run is not None:
                # Keep the two latest: a third selection removes the first.
                remaining = [other for other in self._selected if other != key]
                self._selected = remaining if key in self._selected else [*remaining, key][-2:]
                self._draw_list()
            case "open" if run is not None:
                self.open(run)
            case "stop" if run is not None:
                self._stop_run(run)
            case "resume" | "force" if summary is not None and run is not None:
                self._resume_run(key, summary, force=kind == "force")
            case "trace" if run is not None:
                self._open_trace(run)
            case _:
                raise IgnoredError(act)

    def _compare_selected(self) -> None:
        runs = [self._rows[key].run for key in self._selected]
        if len(runs) == 2 and runs[0] is not None and runs[1] is not None:
            self.compare(runs[0], runs[1])

    def _stop_run(self, run: ss.Run) -> None:
        try:
            run.press("Stop")
        except OSError as error:
            self._set_message(str(error))
        self.read_folder()

    def _resume_run(self, key: str, summary: RunSummary, *, force: bool) -> None:
        assert summary.run is not None
        reason = self._why_not_resume(summary)
        if reason is not None:
            self._show_resumed(key, ValueError(reason))
        elif summary.run.target:
            self._submit_again(key, summary.run, force=force)
        else:
            self._show_resumed(key, try_call(partial(resume_run, summary.run, force=force)))

    def _submit_again(self, key: str, run: ss.Run, *, force: bool) -> None:
        """Resume a run of a scheduler in a thread: it may take seconds to answer."""
        self._is_submitting = True
        self._set_message(SUBMITTING)
        self._draw_shown()

        def end_submission(result: ss.Run | Exception) -> None:
            self._is_submitting = False
            self._show_resumed(key, result)

        call_in_thread(partial(resume_run, run, force=force), end_submission, "shardscope-resume")

    def _show_resumed(self, key: str, result: ss.Run | Exception) -> None:
        if self.comm is None:  # Closed meanwhile; the run goes on.
            return
        if not isinstance(result, Exception):
            self._set_message("")
            self._resumed = result
            self.read_folder()
            self.open(result)
            if self._on_resume is not None:
                self._on_resume(result)
            return
        # The two refusals that the user may override: little free memory, and a folder that looks local.
        is_optional = (
            isinstance(result, TooLittleFreeError) or getattr(result, "field", "") == "launch.folder"
        )
        self._set_message(str(result) or type(result).__name__, force=key if is_optional else None)
        self._draw_shown()

    def _why_not_resume(self, summary: RunSummary) -> str | None:
        """Return why a run cannot be resumed now; None if it can."""
        if summary.why_not_resumable is not None:
            return summary.why_not_resumable
        if self._is_submitting:
            return SUBMITTING
        # Only runs of this machine compete for it.
        is_here = summary.run is not None and not summary.run.target
        resumed = self._resumed if self._resumed is not None and not self._resumed.target else None
        if is_here and (self._is_busy() or (resumed is not None and resumed.status not in FINAL)):
            return IS_BUSY
        living = (one for one in self._rows.values() if one.is_live and one.resumed_from == summary.name)
        later = next(living, None)
        return None if later is None else f"{make_printable(later.name)} is already continuing this run."

    def _open_trace(self, run: ss.Run) -> None:
        if self._on_open_trace is not None:
            self._on_open_trace(run)
            return
        from shardscope_widgets.trace import TraceView

        try:
            view = TraceView(run.trace(), height=TRACE_PIXELS)
        except (ValueError, OSError) as error:
            self._set_message(str(error))
            self._draw_shown()
            return
        with self._lock:
            self._close_trace()
            self._trace_place.children = [view]
            self._show_page(self._trace_place)
            name = escape(make_printable(run.name))
            self.bar.value = _render_back_row(f"<span class='ss-clipped'>Trace of <b>{name}</b></span>")

    def _close_trace(self) -> None:
        before, self._trace_place.children = self._trace_place.children, []
        for view in before:
            view.close()

    # ---- updates in the background

    def _run_ended(self, run: ss.Run) -> None:
        """Handle the end reported by the run's view, even for a run that had ended before it was opened."""
        self.read_folder()
        with self._lock:
            if self.run_view.run is run:
                self._draw_opened_bar()
        self._report_ended(drawn=run)

    def _draw_opened_bar(self) -> None:
        """Update the row above an opened run, if one is visible."""
        with self._lock:
            is_shown = not self.is_list_shown and self.run_view.layout.display != "none"
            if self.comm is not None and is_shown:
                self._draw_bar()

    def _report_ended(self, drawn: ss.Run | None = None) -> None:
        """Call ``on_end`` for each awaited run that has ended, even if another one is shown by now.

        A run's view calls this itself once it has ``drawn`` the run to its end.
        """
        with self._lock:
            shown = self.run_view.run
            ended = [
                run
                for run in self._awaited.values()
                if run.status in FINAL and (run is drawn or run is not shown)
            ]
            for run in ended:
                del self._awaited[run.folder]
        if self._on_end is not None:
            for run in ended:
                self._on_end(run)
        if ended:  # Runs that could not be resumed while these were active may be resumable now.
            self._draw_list() if self.is_list_shown else self._draw_opened_bar()

    def _start_watching(self) -> None:
        """Read the folder every few seconds while a run is awaited or the list contains an active one."""
        with self._lock:
            if self._is_watching or not self._should_watch():
                return
            self._is_watching = True
        threading.Thread(target=self._watch_folder, daemon=True, name="shardscope-runs-view").start()

    def _should_watch(self) -> bool:
        living = any(summary.is_live for summary in self._rows.values())
        return self.comm is not None and (bool(self._awaited) or (living and self.is_list_shown))

    def _watch_folder(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(READ_SECONDS)
            with self._lock:
                if not self._should_watch():
                    self._is_watching = False
                    return
            try:
                self.read_folder()
                self._report_ended()
            except Exception as error:  # A damaged folder: the list tries again at the next read.
                self._set_message(f"The list could not be read: {error}")


def _render_back_row(rest: str) -> str:
    return (
        "<button type='button' class='ss-act' data-act='back'><span aria-hidden='true'>←</span> "
        f"Back to all runs</button>{rest}"
    )


def _make_key(name: str) -> str:
    """Return a row key that is safe for any folder name, including quotes and invalid UTF-8."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:12]
