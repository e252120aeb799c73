"""A button that runs long work in the background, with progress and a way to cancel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from html import escape
from typing import TypeVar

import ipywidgets as widgets

from shardscope_widgets.kit import controls
from shardscope_widgets.kit.clickable import Clickable

MAX_SHOWN_CHARACTERS = 300
MIN_ESTIMATING_FRACTION = 0.3
"""Fraction after which progress is used to estimate the remaining time; earlier progress is startup."""
MIN_SECONDS_BETWEEN_MESSAGES = 0.1
"""Minimum seconds between progress messages: a browser that receives too many falls behind."""

Result = TypeVar("Result")
Progress = Callable[[str, float], None]


class CancelledError(Exception):
    """The error raised in work that the user cancelled."""


class DurationEstimate:
    """The duration of the work: the expected one at first, then an estimate from the progress."""

    def __init__(self, expected_seconds: float | None) -> None:
        self._total_seconds = expected_seconds
        self._is_expected = expected_seconds is not None
        self._fraction = 0.0

    def format(self, seconds: float, fraction: float) -> str:
        """Return ``12 s of about 40 s``; only the elapsed time if no duration was expected."""
        # Update the estimate only when a part ends: progress within a part is unknown.
        if self._is_expected and fraction >= MIN_ESTIMATING_FRACTION and fraction > self._fraction:
            self._fraction, self._total_seconds = fraction, seconds / fraction
        total = self._total_seconds
        remaining = f" of {describe_duration(total)}" if total is not None and seconds < total else ""
        return f"{seconds:.0f} s{remaining}"


def describe_duration(seconds: float) -> str:
    """Return ``about 40 s`` or ``about 3 minutes``."""
    return (
        f"about {max(5, 5 * round(seconds / 5))} s" if seconds < 90 else f"about {seconds / 60:.0f} minutes"
    )


class WorkPanel(widgets.HBox):
    """A button that runs one piece of work at a time in a thread, so that the kernel stays responsive."""

    def __init__(
        self,
        label: str,
        tooltip: str,
        on_press: Callable[[], None] | None = None,
        words: Clickable | None = None,
    ) -> None:
        """Create the panel. ``on_press`` starts the work; without it the button repeats the latest work."""
        self._cancel = threading.Event()
        self._repeat: Callable[[], None] | None = None
        self._is_busy = False
        # Reentrant: an observer of the enabled button may start the next work immediately.
        self._changing = threading.RLock()
        self.button = controls.create_button(
            label, "ss-ghost", "ss-small", tooltip=tooltip, layout=widgets.Layout()
        )
        self.button.on_click(lambda _: (on_press or self._repeat_latest)())
        # Layouts of their own, not shared ones: progress and Cancel are shown only during the work.
        self.progress = widgets.FloatProgress(
            min=0, max=1, layout=widgets.Layout(width="120px", display="none"), tooltip=label
        )
        self.cancel = controls.create_button("Cancel", "ss-link", layout=widgets.Layout(display="none"))
        self.cancel.on_click(lambda _: self._cancel.set())
        self.words = words or controls.create_html()
        """The status text, which the view places itself because it can be long."""
        controls.add_classes(self.words, "ss-hint", "ss-words")
        super().__init__([self.button, self.progress, self.cancel])
        self.add_class("ss-work")

    @property
    def is_busy(self) -> bool:
        """Return whether work is running, or its end is being shown by its thread."""
        with self._changing:
            return self._is_busy

    def show_button(self, is_shown: bool) -> None:
        """Show the button, or hide it."""
        self.button.layout.display = "" if is_shown else "none"

    def start(
        self,
        work: Callable[[Progress], Result],
        on_done: Callable[[Result], None],
        describe_result: Callable[[Result, float], str | None],
        expected_seconds: float | None = None,
    ) -> None:
        """Run ``work`` unless other work is running; ``on_done`` receives its result in the same thread.

        ``work`` receives ``progress(message, fraction)``, which raises :class:`CancelledError` once the user
        has pressed Cancel. ``describe_result`` receives the result and the elapsed seconds and returns the
        status text, or None if ``on_done`` has set it. ``expected_seconds`` is shown next to the elapsed time
        until the progress gives a better estimate.
        """
        with self._changing:
            if self._is_busy:
                return
            self._repeat = partial(self.start, work, on_done, describe_result, expected_seconds)
            self._cancel.clear()
            self._show_busy(True)
        # A thread, not a task of the event loop: the work computes, and every click waits for that loop.
        threading.Thread(
            target=self._run_work,
            args=(work, on_done, describe_result, expected_seconds),
            daemon=True,
            name="shardscope-work",
        ).start()

    def _repeat_latest(self) -> None:
        if self._repeat is not None:
            self._repeat()

    def _run_work(
        self,
        work: Callable[[Progress], Result],
        on_done: Callable[[Result], None],
        describe_result: Callable[[Result, float], str | None],
        expected_seconds: float | None,
    ) -> None:
        started = time.monotonic()
        message_time = -1.0
        estimate = DurationEstimate(expected_seconds)

        # Python cannot end a thread from outside: cancelled work ends itself here, at its next report.
        def report_progress(message: str, fraction: float) -> None:
            nonlocal message_time
            if self._cancel.is_set():
                raise CancelledError
            now = time.monotonic()
            if now - message_time >= MIN_SECONDS_BETWEEN_MESSAGES:
                message_time = now
                self.progress.value = fraction
                self._write(f"{message} · {estimate.format(now - started, fraction)}")

        try:
            result = work(report_progress)
            seconds = time.monotonic() - started
            # Before the status text, because on_done may write it (describe_result then returns None).
            on_done(result)
            message = describe_result(result, seconds)
            if message is not None:
                self.show_message(message)
        except CancelledError:
            self.show_message("Cancelled.")
        except Exception as error:  # an exception in a thread is not shown in a notebook
            self.show_message(str(error) or type(error).__name__, is_error=True)
        finally:
            with self._changing:
                self._show_busy(False)

    def _show_busy(self, busy: bool) -> None:
        self._is_busy = busy
        self.progress.value = 0
        for widget in (self.progress, self.cancel):
            widget.layout.display = "" if busy else "none"
        # Last, because an observer may start the next work.
        self.button.disabled = busy

    @property
    def is_cancelled(self) -> bool:
        """Return whether the latest work was cancelled."""
        return self._cancel.is_set()

    def close(self) -> None:
        """Cancel the work as well: its result is no longer needed."""
        self._cancel.set()
        super().close()

    def show_message(self, message: str, is_error: bool = False) -> None:
        """Show ``message`` below the button."""
        # An error of a worker process has its traceback below the message, which would fill the page.
        first_line = message.partition("\nTraceback")[0].partition("\n")[0]
        shown = (
            first_line
            if len(first_line) <= MAX_SHOWN_CHARACTERS
            else first_line[:MAX_SHOWN_CHARACTERS] + " …"
        )
        # Screen readers say results and errors by themselves, but not each report of the progress.
        self._write(shown, " class='ss-error' role='alert'" if is_error else " data-said='work'")

    def _write(self, text: str, attributes: str = "") -> None:
        self.words.value = f"<span{attributes}>{escape(text)}</span>"
