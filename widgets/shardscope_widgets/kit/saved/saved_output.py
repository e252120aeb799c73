"""The static picture of a live view in a notebook's saved output, kept up to date.

A view is displayed as two outputs: the widget and its picture. The picture is hidden while the widget is
live. Without a widget (GitHub, nbviewer, nbconvert, a notebook whose kernel has stopped), the picture is
shown and JupyterLab's "Error displaying widget" is hidden. The picture is a separate output because
JupyterLab would redraw the widget when its own output is updated (``OutputArea._setOutput`` of 4.6).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, TypedDict, TypeVar

import anywidget
import ipywidgets as widgets

from shardscope_widgets.kit import controls
from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.kit.saved.static_picture import TEXT_WIDGETS
from shardscope_widgets.kit.sheet import Sheet

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

PAUSE_SECONDS = 1.0
"""Seconds without a change after which the picture is redrawn."""
MAX_SECONDS = 15.0
"""Maximum seconds between redraws of a view that changes all the time, such as a run's."""

# `:has` finds the live widget wherever a front end puts the two outputs. Browsers without it show both.
HIDING = """<style>
body:has(.ss-live-{id}) .ss-static-{id},
body:has(.ss-live-{id}) .jp-OutputArea-child:has(.ss-static-{id}),
.jp-OutputArea-child:not(:has(.ss-live-{id})):has(+ .jp-OutputArea-child .ss-static-{id}) {{ display: none; }}
</style>"""


class TraitChange(TypedDict):
    """The change of an observed trait, as traitlets reports it."""

    name: str
    new: Sequence[widgets.Widget]
    """The new children, if ``name`` is ``children``."""


Displayed = TypeVar("Displayed", bound=widgets.DOMWidget)


def list_sheets(view: widgets.DOMWidget) -> Iterable[widgets.Widget]:
    """Return the sheets of a view, whose front end saves pictures (``saved_picture.js``)."""
    return [child for child in getattr(view, "children", ()) if isinstance(child, Sheet)]


class SavedOutput(Generic[Displayed]):
    """The two outputs of a view: its widget and its picture, which is updated when the view changes.

    ``draw`` returns the picture of a view, and ``list_savers`` the widgets whose front end saves it.
    """

    def __init__(
        self,
        view: Displayed,
        draw: Callable[[Displayed], str],
        list_savers: Callable[[Displayed], Iterable[widgets.Widget]] = list_sheets,
    ) -> None:
        self._view = weakref.ref(view)
        self._draw, self._list_savers = draw, list_savers
        self._id = view.model_id
        self._published = ""
        self._changed_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shell: InteractiveShell | None = None
        self._followed: dict[str, tuple[widgets.Widget, str]] = {}
        """Observed traits by model."""

    def display(self) -> None:
        """Display the live view and its picture, the fallback for readers without a kernel."""
        from IPython import get_ipython
        from IPython.display import publish_display_data

        view = self._view()
        if view is None:
            return
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:  # A kernel without an event loop: updating at the end of each cell is enough.
            self._loop = None
        if self._shell is None and (shell := get_ipython()) is not None:
            self._shell = shell
            shell.events.register("post_run_cell", self._publish_changes)
        # The class by which HIDING finds the live widget.
        view.add_class(f"ss-live-{self._id}")
        # A view's own bundle has the picture as well; anywidget's has what Colab needs as metadata.
        if isinstance(view, anywidget.AnyWidget):
            live, metadata = anywidget.AnyWidget._repr_mimebundle_(view) or ({}, {})
        else:
            live, metadata = widgets.DOMWidget._repr_mimebundle_(view) or {}, {}
        # Readers without widgets would see ipywidgets' own text, "Studio(children=...)", above the picture.
        publish_display_data({**live, "text/plain": ""}, metadata=metadata)
        self._follow_widget(view)
        self._published = self._draw(view)
        publish_display_data(self._build_bundle(), transient={"display_id": self._display_id})

    def redraw(self) -> None:
        """Publish the picture again, after a change of something that is no widget."""
        self._changed_since = time.monotonic()
        self._publish_changes()

    def close(self) -> None:
        """Stop following the view; the last picture remains."""
        if self._timer is not None:
            self._timer.cancel()
        for widget, name in self._followed.values():
            widget.unobserve(self._handle_change, name)
        self._followed.clear()
        if self._shell is not None:
            self._shell.events.unregister("post_run_cell", self._publish_changes)
            self._shell = None

    @property
    def _display_id(self) -> str:
        return f"shardscope-{self._id}"

    def _build_bundle(self) -> dict[str, str]:
        html = f"{HIDING.format(id=self._id)}<div class='ss-static-{self._id}'>{self._published}</div>"
        view = self._view()
        return {"text/html": html, "text/plain": f"<{type(view).__name__}>"}

    def _follow_widget(self, widget: widgets.Widget) -> None:
        """Observe every change of what the picture shows, including in widgets added later."""
        if widget.comm is None or widget.model_id in self._followed:
            return
        if isinstance(widget, Chart):
            self._observe_trait(widget, "revision")
        elif isinstance(widget, TEXT_WIDGETS):
            self._observe_trait(widget, "value")
        elif isinstance(widget, widgets.Box):
            self._observe_trait(widget, "children")
        else:
            return
        # A chart's layout is plotly's and has no display; shared layouts never change.
        if not isinstance(widget, Chart) and not controls.is_shared(widget.layout):
            self._observe_trait(widget.layout, "display")
        for child in getattr(widget, "children", ()):
            self._follow_widget(child)

    def _observe_trait(self, widget: widgets.Widget, name: str) -> None:
        self._followed[widget.model_id] = (widget, name)
        widget.observe(self._handle_change, name)

    def _handle_change(self, change: TraitChange) -> None:
        if change["name"] == "children":
            # Observed widgets are kept alive by this dictionary: forget those that were closed.
            self._followed = {key: it for key, it in self._followed.items() if it[0].comm is not None}
            for child in change["new"]:
                self._follow_widget(child)
        is_first, now = self._changed_since is None, time.monotonic()
        self._changed_since = self._changed_since or now
        # Runs change their views from other threads, but only the event loop's thread may start its timers.
        # Each change restarts the delay.
        if self._loop is not None and (is_first or now - self._changed_since < MAX_SECONDS):
            with contextlib.suppress(RuntimeError):  # The kernel is shutting down.
                self._loop.call_soon_threadsafe(self._restart_timer)

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._changed_since is None or self._loop is None:
            return
        left = self._changed_since + MAX_SECONDS - time.monotonic()
        self._timer = self._loop.call_later(max(0.0, min(PAUSE_SECONDS, left)), self._publish_changes)

    def _publish_changes(self, *_: object) -> None:
        from IPython.display import publish_display_data

        view = self._view()
        if self._changed_since is None or view is None or view.comm is None:
            return
        self._changed_since = None
        picture = self._draw(view)
        # An update marks the notebook as changed, so only a different picture is sent.
        if picture != self._published:
            self._published = picture
            bundle = self._build_bundle()
            publish_display_data(bundle, transient={"display_id": self._display_id}, update=True)
            # JupyterLab no longer knows the output after the page was reloaded or the cell was moved.
            for saver in self._list_savers(view):
                saver.send({"type": "picture", "picture": bundle["text/html"], "of": f"ss-static-{self._id}"})
