"""A button that starts long work in the background, how far that is, and the way to stop it."""

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
"""From here on, what is done says how long the rest takes; before, it was starting."""
LEAST_SECONDS_BETWEEN_WORDS = 0.1
"""A browser that gets a thousand messages shows the last of them long after it was true."""

Answer = TypeVar("Answer")
Progress = Callable[[str, float], None]


class CancelledError(Exception):
    """Somebody pressed Cancel."""


class Takes:
    """How long work takes: as it was expected, and once a part of it is done, as that part says."""

    def __init__(self, expected_seconds: float | None) -> None:
        self._whole = expected_seconds
        self._is_told = expected_seconds is not None
        self._fraction = 0.0

    def words(self, seconds: float, fraction: float) -> str:
        """``12 s of about 40 s``; of work that was not expected to take any time, only the first half."""
        # Only as a part ends: in the midst of one, nobody knows how far it is.
        if self._is_told and fraction >= TELLING_FRACTION and fraction > self._fraction:
            self._fraction, self._whole = fraction, seconds / fraction
        whole = self._whole
        return f"{seconds:.0f} s" + (f" of {about(whole)}" if whole is not None and seconds < whole else "")


def about(seconds: float) -> str:
    """``about 40 s``, ``about 3 minutes``."""
    return (
        f"about {max(5, 5 * round(seconds / 5))} s" if seconds < 90 else f"about {seconds / 60:.0f} minutes"
    )


class WorkPanel(widgets.HBox):
    """Does one piece of work at a time, in a thread: the kernel stays free, and so does the notebook."""

    def __init__(
        self, label: str, tooltip: str, on_press: Callable[[], None], words: Clickable | None = None
    ) -> None:
        self._cancel = threading.Event()
        self.is_busy = False
        """Whether work is under way."""
        # Reentrant: who sees the button let go may start the next work there and then.
        self._changing = threading.RLock()
        self.button = controls.button(label, "ss-ghost", "ss-small", tooltip=tooltip, layout=widgets.Layout())
        self.button.on_click(lambda _: on_press())
        self.progress = widgets.FloatProgress(
            min=0, max=1, layout=widgets.Layout(width="120px", display="none"), tooltip=label
        )
        self.cancel = controls.button("Cancel", "ss-link", layout=widgets.Layout(display="none"))
        self.cancel.on_click(lambda _: self._cancel.set())
        self.words = words or controls.html()
        """Stands apart, where the view puts it: these words can be long."""
        for name in ("ss-hint", "ss-words"):
            self.words.add_class(name)
        super().__init__([self.button, self.progress, self.cancel])
        self.add_class("ss-work")

    def offer(self, offered: bool) -> None:
        """Whether there is anything that a press on the button would do."""
        self.button.layout.display = "" if offered else "none"

    def start(
        self,
        work: Callable[[Progress], Answer],
        on_done: Callable[[Answer], None],
        done_words: Callable[[Answer, float], str | None],
        expected_seconds: float | None = None,
    ) -> None:
        """Do ``work`` unless other work is under way; ``on_done`` gets what it returns, in the same thread.

        ``work`` is given ``progress(words, fraction)``, which raises :class:`CancelledError` once somebody
        pressed Cancel. ``done_words`` says, of the answer and its seconds, what stands beside the button, or
        None where ``on_done`` wrote that itself. ``expected_seconds`` stand beside those that have passed,
        until the work's own progress says more.
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
        except Exception as error:  # a notebook shows nobody what is raised in a thread
            self.say(str(error) or type(error).__name__, is_error=True)
        finally:
            with self._changing:
                self._show_busy(False)

    def _show_busy(self, busy: bool) -> None:
        self.is_busy = busy
        self.progress.value = 0
        for widget in (self.progress, self.cancel):
            widget.layout.display = "" if busy else "none"
        # Last: who watches it may start the next work.
        self.button.disabled = busy

    @property
    def is_cancelled(self) -> bool:
        """Whether the latest work was told to stop."""
        return self._cancel.is_set()

    def close(self) -> None:
        """End the work too: nobody is left to read what it finds."""
        self._cancel.set()
        super().close()

    def say(self, words: str, is_error: bool = False) -> None:
        """Words under the button."""
        first = words.partition("\nTraceback")[0].partition("\n")[0]
        shown = first if len(first) <= SHOWN_WORDS else first[:SHOWN_WORDS] + " …"
        role = " class='ss-error' role='alert'" if is_error else ""
        self.words.value = f"<span{role}>{escape(shown)}</span>"
