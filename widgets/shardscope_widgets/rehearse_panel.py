"""The button that plays a plan with its framework's own code, how far that is, and the way to stop it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from html import escape

import ipywidgets as widgets

import shardscope as ss
from shardscope.memory.report import MemoryReport
from shardscope_widgets import shared

TIMEOUT_SECONDS = 600.0
SHOWN_WORDS = 300


class CancelledError(Exception):
    """Somebody pressed Cancel."""


class RehearsePanel(widgets.HBox):
    """Rehearses one plan at a time in the background; ``on_report`` gets the plan and its report."""

    def __init__(self, on_report: Callable[[ss.Plan, MemoryReport], None]) -> None:
        self._on_report = on_report
        self._plan: ss.Plan | None = None
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None
        self.button = shared.button(
            "Rehearse on fake tensors",
            "ss-ghost",
            "ss-small",
            tooltip="Run the framework's own code at true sizes: no GPU and no memory are needed",
        )
        self.button.on_click(self._start)
        self.progress = widgets.FloatProgress(
            min=0, max=1, layout=widgets.Layout(width="120px", display="none"), tooltip="Rehearsal"
        )
        self.cancel = shared.button("Cancel", "ss-link", layout=widgets.Layout(display="none"))
        self.cancel.on_click(lambda _: self._cancel.set())
        self.words = shared.html("", "ss-hint", "ss-words")
        """Stands apart, where the view puts it: a framework's own words can be long."""
        super().__init__([self.button, self.progress, self.cancel])
        self.add_class("ss-rehearse")
        # A Plan that cannot be rehearsed has no such method: then there is nothing to offer.
        self.layout.display = "" if hasattr(ss.Plan, "rehearse") else "none"

    @property
    def is_busy(self) -> bool:
        """Whether a rehearsal is under way."""
        return self._thread is not None and self._thread.is_alive()

    def offer(self, plan: ss.Plan) -> None:
        """Say what pressing the button would rehearse."""
        if plan != self._plan and not self.is_busy:
            self.words.value = ""
        self._plan = plan

    def _start(self, _: object) -> None:
        if self._plan is None or self.is_busy:
            return
        self._cancel.clear()
        self._show_busy(True)
        self._thread = threading.Thread(
            target=self._rehearse, args=(self._plan,), daemon=True, name="shardscope-rehearsal"
        )
        self._thread.start()

    def _rehearse(self, plan: ss.Plan) -> None:
        started = time.monotonic()

        def progress(words: str, fraction: float) -> None:
            if self._cancel.is_set():
                raise CancelledError
            self.progress.value = fraction
            self._say(f"{words} · {time.monotonic() - started:.0f} s")

        try:
            report = plan.rehearse(progress=progress, timeout=TIMEOUT_SECONDS)
        except CancelledError:
            self._say("cancelled")
        except Exception as error:  # whatever a framework's own code says, the person reads it here
            self._say(str(error) or type(error).__name__, is_error=True)
        else:
            self._say(f"rehearsed in {time.monotonic() - started:.0f} s")
            self._on_report(plan, report)
        finally:
            self._show_busy(False)

    def _show_busy(self, busy: bool) -> None:
        self.button.disabled = busy
        self.progress.value = 0
        for widget in (self.progress, self.cancel):
            widget.layout.display = "" if busy else "none"

    def _say(self, words: str, is_error: bool = False) -> None:
        first = words.partition("\nTraceback")[0].partition("\n")[0]
        short = first if len(first) <= SHOWN_WORDS else first[:SHOWN_WORDS] + " …"
        role = " class='ss-error' role='alert'" if is_error else ""
        self.words.value = f"<span{role}>{escape(short)}</span>"
