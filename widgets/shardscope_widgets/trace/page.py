"""The Studio's Trace tab: a run's trace, the sentences about it, and tables that answer questions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from html import escape

import anywidget
import ipywidgets as widgets

import shardscope as ss
from shardscope.runs.explain.measured import MeasuredMemory
from shardscope.runs.profiling_request import find_recording
from shardscope.trace import Trace
from shardscope.trace.summary.summary import Sentence, TraceSummary, describe_recording
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_calls import LatestRequest, call_in_loop, find_running_loop
from shardscope_widgets.kit.background_work import Progress, WorkPanel
from shardscope_widgets.kit.front_end import front_end_text
from shardscope_widgets.kit.view import View
from shardscope_widgets.trace.analysis_page import Interval
from shardscope_widgets.trace.analysis_panel import AnalysisPanel
from shardscope_widgets.trace.findings_list import FindingsList
from shardscope_widgets.trace.run_names import render_title
from shardscope_widgets.trace.view import NOT_ANALYSED, TraceView

NO_TRACE = 'No trace yet. Launch a run with "Record a trace" checked, or open a trace in the Runs tab.'
SUMMARIZING = "Looking for what costs time …"
OPEN_LABEL = "Open the trace"


class ScrollToNext(anywidget.AnyWidget):
    """An invisible widget that scrolls the widget after it into sight: tables below may have moved it."""

    _esm = front_end_text("trace", "scroll.js")

    def __init__(self) -> None:
        super().__init__(layout=controls.share_layout())

    def scroll(self) -> None:
        """Scroll as far as needed; not at all if the next widget is in sight."""
        self.send("show")


class TraceAnswers(View):
    """One trace: its run, its findings as sentences, all ranks on one time axis, and tables below.

    ``on_apply`` receives the changed plan of a sentence. ``on_rates`` is called when predictions have begun
    or ceased to use the rates that the trace measured. ``measured`` is the memory of the traced ``run``.
    """

    def __init__(
        self,
        view: TraceView,
        *,
        on_apply: Callable[[ss.Plan], None],
        on_rates: Callable[[], None] = lambda: None,
        measured: MeasuredMemory | None = None,
        run: ss.Run | None = None,
    ) -> None:
        self.view = view
        self.title = controls.create_html(render_title(view.trace, run))
        self.findings = FindingsList(self._show_sentence, on_apply)
        self.panel = AnalysisPanel(
            view.trace,
            on_show=self.show_interval,
            on_path=self._draw_path,
            on_rates=on_rates,
            measured=measured,
            run=run,
        )
        self._summaries: LatestRequest[str, TraceSummary] = LatestRequest(
            lambda _: view.trace.summary(), "shardscope-summary"
        )
        self._scroll = ScrollToNext()
        super().__init__(
            [self.title, self.findings, self._scroll, view, self.panel], layout=controls.share_layout()
        )
        self.add_class("ss-trace-answers")

    def start(self) -> None:
        """Compute the sentences and the first table in the background."""
        known = f"{describe_recording(self.view.trace)} {NOT_ANALYSED}"
        self.findings.show_hint(SUMMARIZING, saved=known)
        self._summaries.request("summary", self._show_summary)

    def _show_summary(self, result: TraceSummary | Exception) -> None:
        if isinstance(result, Exception):
            self.findings.show_hint(f"No summary: {result}")
        else:
            self.findings.show_sentences(result.findings)
        # After the summary, which shares most of its work and is read first.
        self.panel.start()

    def show_interval(self, interval: Interval) -> None:
        """Move the view to ``interval``."""
        start, end, rank, track = interval
        self.view.show_interval(start, end, rank=rank, track=track)
        self._scroll.scroll()

    def _show_sentence(self, sentence: Sentence) -> None:
        if sentence.start_seconds is not None and sentence.end_seconds is not None:
            self.show_interval(
                Interval(sentence.start_seconds, sentence.end_seconds, sentence.rank, sentence.track)
            )

    def _draw_path(self, parts: Sequence[Mapping[str, object]] | None) -> None:
        # The rows of a long path take seconds to find.
        self.view._highlight_path_later(parts)
        self._scroll.scroll()


class TracePage(widgets.VBox):
    """The Studio's Trace tab: the trace of one run, the progress of opening it, or a hint.

    ``on_apply`` and ``on_rates`` are those of :class:`TraceAnswers`.
    """

    def __init__(
        self,
        height: int,
        *,
        on_apply: Callable[[ss.Plan], None] = lambda plan: None,
        on_rates: Callable[[], None] = lambda: None,
    ) -> None:
        self._height, self._on_apply, self._on_rates = height, on_apply, on_rates
        self._opening: WorkPanel | None = None
        super().__init__([_create_hint(NO_TRACE)])
        self.add_class("ss-trace-page")

    def show_run(self, run: ss.Run) -> None:
        """Open the trace of ``run`` in the background, and show it or why it has none."""
        loop = find_running_loop()
        opening = WorkPanel(OPEN_LABEL, "Read the recordings of all ranks", lambda: self.show_run(run))
        opening.show_button(False)
        page = View([opening, opening.words], layout=controls.share_layout())
        page.add_class("ss-opening")
        self._replace_page(page, opening)

        def open_trace(progress: Progress) -> TraceAnswers:
            progress("Opening the trace", 0.0)
            trace = Trace.load(
                find_recording(run, None), progress=lambda share: progress("Reading the trace", share)
            )
            progress("Drawing the trace", 1.0)
            return self._build_answers(trace, run)

        def show(answers: TraceAnswers) -> None:
            # Cancelled, or another run was opened meanwhile.
            if opening is not self._opening or opening.is_cancelled:
                answers.close()
                return
            self._replace_page(answers)
            answers.start()

        is_loaded = threading.Event()

        def finish(answers: TraceAnswers) -> None:
            is_loaded.set()
            call_in_loop(loop, lambda: show(answers))

        def offer_again(change: object) -> None:
            # It was cancelled or failed.
            if not opening.button.disabled and opening is self._opening and not is_loaded.is_set():
                opening.show_button(True)

        opening.button.observe(offer_again, "disabled")
        opening.start(open_trace, finish, lambda *_: "")

    def _build_answers(self, trace: Trace, run: ss.Run) -> TraceAnswers:
        measured = None
        with suppress(ValueError, OSError):  # of a damaged run folder; the trace is readable nevertheless
            measured = run.memory()
        view = TraceView(trace, height=self._height)
        return TraceAnswers(
            view, on_apply=self._on_apply, on_rates=self._on_rates, measured=measured, run=run
        )

    def show_hint(self, text: str) -> None:
        """Show ``text`` instead of a trace."""
        self._replace_page(_create_hint(text))

    def _replace_page(self, page: widgets.Widget, opening: WorkPanel | None = None) -> None:
        # Replace first: closing a widget that is still displayed would show an error. The page before it may
        # hold a whole trace.
        before, self.children = self.children, [page]
        self._opening = opening
        for old in before:
            old.close()


def _create_hint(text: str) -> widgets.HTML:
    return controls.create_html(escape(text), "ss-hint")
