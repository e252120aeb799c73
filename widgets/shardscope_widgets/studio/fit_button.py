"""The head's "Make it fit" button: the cheapest combination of changes that fits, found in the background."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import ipywidgets as widgets

import shardscope as ss
from shardscope.planner.make_it_fit import Fit, make_it_fit
from shardscope.planner.verdict import Verdict
from shardscope_widgets.kit import controls

LABEL = "Make it fit"
LOOKING = "Looking for a way …"
TOOLTIP = "Apply the cheapest combination of changes that fits"


class FitButton:
    """Shows :attr:`button` while the plan on offer does not fit; ``on_fit`` gets the plan and its fit."""

    def __init__(self, on_fit: Callable[[ss.Plan, Fit | Exception | None], None]) -> None:
        self._on_fit = on_fit
        self._plan: ss.Plan | None = None
        self._thread: threading.Thread | None = None
        self.button = controls.button(
            LABEL, "ss-button", "ss-fit-button", tooltip=TOOLTIP, layout=widgets.Layout(display="none")
        )
        self.button.on_click(lambda _: self.start())

    def offer(self, plan: ss.Plan, verdict: Verdict) -> None:
        """Show the button if ``plan`` does not fit."""
        self._plan = plan
        self.button.layout.display = "" if verdict.state == "does not fit" else "none"

    def start(self) -> None:
        """Look for the changes in a thread: a search of large clusters takes seconds, and cells must run."""
        plan = self._plan
        if plan is None or (self._thread is not None and self._thread.is_alive()):
            return
        self.button.description, self.button.disabled = LOOKING, True
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # A script: there are no inputs that could change at the same time.
            loop = None
        self._thread = threading.Thread(
            target=self._look, args=(plan, loop), daemon=True, name="shardscope-fit"
        )
        self._thread.start()

    def _look(self, plan: ss.Plan, loop: asyncio.AbstractEventLoop | None) -> None:
        found: Fit | Exception | None
        try:
            found = make_it_fit(plan)
        except Exception as error:  # Raised in a thread, it would be shown nowhere.
            found = error
        # Inputs are set by the kernel's own thread: a user may change one at this moment.
        if loop is None:
            self._report(plan, found)
        else:
            loop.call_soon_threadsafe(self._report, plan, found)

    def _report(self, plan: ss.Plan, found: Fit | Exception | None) -> None:
        self.button.description, self.button.disabled = LABEL, False
        # An input that was changed meanwhile asks another question.
        if self._plan is plan:
            self._on_fit(plan, found)
