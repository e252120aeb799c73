"""Free memory and processes of each GPU, or of the host if there are no GPUs; read on request."""

from __future__ import annotations

import threading
import time
from html import escape

from shardscope.core.number_format import format_gib
from shardscope.runs.watch.free_memory import FreeMemory, read_free_memory
from shardscope_widgets.kit.background_calls import Debounced
from shardscope_widgets.kit.clickable import Clickable

FIRST_READ_SECONDS = 0.5
"""Delay after the view's creation, so that the Studio is drawn first."""


class FreeMemoryList(Clickable):
    """The free-memory list without a stylesheet, for views that have one."""

    def __init__(self) -> None:
        super().__init__(lambda _: self.read_in_background(), "ss-free")
        self._thread: threading.Thread | None = None
        self.value = _render_list([], "reading")

    def read_now(self) -> None:
        """Query the drivers and show the result; this may block the calling thread for a second."""
        try:
            self.value = _render_list(read_free_memory(), time.strftime("%H:%M:%S"))
        except OSError as error:  # ./runs cannot be read.
            self.value = _render_list([], str(error))

    def read_in_background(self) -> None:
        """Query in the background, unless a query is already running."""
        # A closed view has no comm. Querying the drivers may take a second, so one query at a time is enough.
        if self.comm is None or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self.read_now, daemon=True, name="shardscope-free")
        self._thread.start()


def schedule_first_read(free_list: FreeMemoryList) -> Debounced:
    """Query the free memory once, after the Studio is drawn."""
    later = Debounced(free_list.read_in_background, FIRST_READ_SECONDS)
    later.request()
    return later


def _render_list(memories: list[FreeMemory], when: str) -> str:
    rows = "".join(_render_row(memory) for memory in memories)
    return (
        f"<div class='ss-free-head'><span>Free now <span class='ss-hint'>{escape(when)}</span></span>"
        "<button class='ss-again' type='button' data-act='look' aria-label='Read the free memory again'>"
        f"refresh</button></div>{rows}"
    )


def _render_row(memory: FreeMemory) -> str:
    # A driver that reports no total must not raise here, in a thread whose errors are not shown.
    used = 1 - memory.free_bytes / memory.total_bytes if memory.total_bytes else 0.0
    amount = f"{format_gib(memory.free_bytes)} of {format_gib(memory.total_bytes)} GiB"
    users, share = "; ".join(memory.users), f"{100 * used:.0f} % in use"
    return (
        f"<div class='ss-place'><span>{escape(memory.name)}</span><span>{amount}</span>"
        f"<div class='ss-used' role='img' aria-label='{share}' title='{share}'>"
        f"<i style='width:{100 * used:.1f}%'></i></div>"
        + (f"<span class='ss-users'>{escape(users)}</span>" if users else "")
        + "</div>"
    )
