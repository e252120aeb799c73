"""Runs that go on though nobody here watches them: after a kernel's restart, or from another notebook."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import shardscope as ss
from shardscope.runs.folder import FINAL
from shardscope_widgets.kit.clickable import Clickable, IgnoredError

MOST = 5
"""Shown of them, the newest."""


class LivingRuns(Clickable):
    """A line for each living run in ``./runs``, with a button that has it watched; empty without one."""

    def __init__(self, on_watch: Callable[[ss.Run], None]) -> None:
        super().__init__(self._watch, "ss-living")
        self._on_watch = on_watch
        self._found: dict[str, ss.Run] = {}

    def look(self, watched: ss.Run | None) -> None:
        """Show those that live now, but for the one that is watched."""
        try:
            runs = [run for run in ss.runs() if run.is_here and run.status not in FINAL]
        except OSError:  # ./runs cannot be read: what is free says so.
            runs = []
        others = [run for run in runs if watched is None or run.folder != watched.folder]
        self._found = {run.name: run for run in others[-MOST:]}
        self.value = "".join(map(_line, self._found.values()))

    def _watch(self, act: str) -> None:
        run = self._found.get(act.removeprefix("watch:"))
        if run is None or not act.startswith("watch:"):
            raise IgnoredError(act)
        self._on_watch(run)


def _line(run: ss.Run) -> str:
    name = escape(run.name, quote=True)
    said = f"data-act='watch:{name}' aria-label='Watch {name}'"
    button = f"<button type='button' class='ss-act' {said}>Watch</button>"
    return f"<div class='ss-note'>The run <b>{name}</b> is {escape(run.status)}. {button}</div>"
