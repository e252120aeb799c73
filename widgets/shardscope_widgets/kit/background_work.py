"""A button that runs long work in the background, with progress and a way to cancel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from html import escape
from typing import TypeVar

import ipywidgets as widgets

from shardscope_widgets.kit import controls
from shardscope_widgets.kit.clickable import Clickable

SHOWN_WORDS = 300
TELLING_FRACTION = 0.3
"""Fraction after which progress is used to estimate the remaining time; earlier progress is startup."""
LEAST_SECONDS_BETWEEN_WORDS = 0.1
"""Minimum seconds between progress messages: a browser that receives too many falls behind."""

Answer = TypeVar("Answer")
Progress = Callable[[str, float], None]


class CancelledError(Exception):
    """The error raised in work that the user cancelled."""


class Takes:
    """The duration of the work: the expected one at first, then an estimate from the progress."""

    def __init__(self, expected_seconds: float | None) -> None:
        self._whole = expected_seconds
        self._is_told = expected_seconds is not None
        self._fraction = 0.0

    def words(self, seconds: float, fraction: float) -> str:
        """Return ``12 s of about 40 s``; only the elapsed time if no duration was expected."""
        # Update the estimate only when a part ends: progress within a part is unknown.
        if self._is_told and fraction >= TELLING_FRACTION and fraction > self._fraction:
            self._fraction, self._whole = fraction, seconds / fraction
        whole = self._whole
        return f"{seconds:.0f} s" + (f" of {about(whole)}" if whole is not None and seconds < whole else "")


def about(seconds: float) -> str:
    """Return ``about 40 s`` or ``about 3 minutes``."""
    return (
        f"about {max(5, 5 * round(seconds / 5))} s" if seconds < 90 else f"about {seconds / 60:.0f} minutes"
    )


class WorkPanel(widgets.HBox):
    """A button that runs one piece of work at a time in a thread, so that the kernel stays responsive."""

    def __init__(
        self, label: str, tooltip: str, on_press: Callable[[], None], words: Clickable | None = None
    ) -> None:
        self._cancel = threading.Event()
        self.is_busy = False
        """Whether work is running."""
        # Reentrant: an observer of the enabled button may start the next work immediately.
        self._changing = threading.RLock()
        self.button = controls.button(label, "ss-ghost", "ss-small", tooltip=tooltip, layout=widgets.Layout())
        self.button.on_click(lambda _: on_press())
        self.progress = widgets.FloatProgress(
            min=0, max=1, layout=widgets.Layout(width="120px", display="none"), tooltip=label
        )
        self.cancel = controls.button("Cancel", "ss-link", layout=widgets.Layout(display="none"))
        self.cancel.on_click(lambda _: self._cancel.set())
        self.words = words or controls.html()
        """The status text, which the view places itself because it can be long."""
        for name in ("ss-hint", "ss-words"):
            self.words.add_class(name)
        super().__init__([self.button, self.progress, self.cancel])
        self.add_class("ss-work")

    def show_button(self, is_shown: bool) -> None:
        """Show the button, or hide it."""
        self.button.layout.display = "" if is_shown else "none"

    def start(
        self,
        work: Callable[[Progress], Answer],
        on_done: Callable[[Answer], None],
        done_words: Callable[[Answer, float], str | None],
        expected_seconds: float | None = None,
    ) -> None:
        """Run ``work`` unless other work is running; ``on_done`` receives its result in the same thread.

        ``work`` receives ``progress(words, fraction)``, which raises :class:`CancelledError` once the user
        has pressed Cancel. ``done_words`` receives the result and the elapsed seconds and returns the status
        text, or None if ``on_done`` has set it. ``expected_seconds`` is shown next to the elapsed time until
        the progress gives a better estimate.
        """
        with self._changing:
            if self.is_busy:
                return
            self._cancel.clear()
            self._show_busy(True)
        threading.Thread(
            target=self._do,
            args=(work, on_done, done_words, expected_seconds),
            daemon=True,
            name="shardscope-work",
        ).start()

    def _do(
        self,
        work: Callable[[Progress], Answer],
        on_done: Callable[[Answer], None],
        done_words: Callable[[Answer, float], str | None],
        expected_seconds: float | None,
    ) -> None:
        started = time.monotonic()
        told = -1.0
        takes = Takes(expected_seconds)

        def progress(words: str, fraction: float) -> None:
            nonlocal told
            if self._cancel.is_set():
                raise CancelledError
            now = time.monotonic()
            if now - told >= LEAST_SECONDS_BETWEEN_WORDS:
                told = now
                self.progress.value = fraction
                self.say(f"{words} · {takes.words(now - started, fraction)}")

        try:
            answer = work(progress)
            seconds = time.monotonic() - started
            on_done(answer)
            done = done_words(answer, seconds)
            if done is not None:
                self.say(done)
        except CancelledError:
            self.say("cancelled")
        except Exception as error:  # an exception in a thread is not shown in a notebook
            self.say(str(error) or type(error).__name__, is_error=True)
        finally:
            with self._changing:
                self._show_busy(False)

    def _show_busy(self, busy: bool) -> None:
        self.is_busy = busy
        self.progress.value = 0
        for widget in (self.progress, self.cancel):
            widget.layout.display = "" if busy else "none"
        # Last, because an observer may start the next work.
        self.button.disabled = busy

    @property
    def is_cancelled(self) -> bool:
        """Whether the latest work was cancelled."""
        return self._cancel.is_set()

    def close(self) -> None:
        """Cancel the work as well: its result is no longer needed."""
        self._cancel.set()
        super().close()

    def say(self, words: str, is_error: bool = False) -> None:
        """Show ``words`` below the button."""
        first = words.partition("\nTraceback")[0].partition("\n")[0]
        shown = first if len(first) <= SHOWN_WORDS else first[:SHOWN_WORDS] + " …"
        role = " class='ss-error' role='alert'" if is_error else ""
        self.words.value = f"<span{role}>{escape(shown)}</span>"
