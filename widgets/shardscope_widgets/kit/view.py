"""The base class of all views: closing frees all widgets, and a saved notebook keeps the last state."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import ipywidgets as widgets

from shardscope.core.errors import add_article, refuse
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.saved.saved_output import SavedOutput
from shardscope_widgets.kit.saved.saved_page import write_page
from shardscope_widgets.kit.saved.static_picture import draw_picture

_EXAMPLES = {
    "Plan": "ss.Plan(arch, cluster, recipe, layout)",
    "Run": 'ss.Run.attach("runs/name")',
    "Ranking": "ss.search(arch, cluster, recipe)",
    "Advice": "ss.recommend(arch, cluster, recipe)",
}
"""Expressions that create what views show, by class."""


class View(widgets.VBox):
    """A view that can be displayed in a notebook and closed at any time."""

    _saved: SavedOutput[View] | None = None

    def _check_shown(self, value: object, kind: type) -> None:
        """Raise ``ValueError``, with an expression that creates a ``kind``, if ``value`` is none."""
        if not isinstance(value, kind):
            field = f"{type(self).__name__} {kind.__name__.lower()}"
            refuse(field, value, add_article(kind.__name__), _EXAMPLES[kind.__name__])

    def close(self) -> None:
        """Close this view and all its child widgets, which ipywidgets would keep until the kernel ends."""
        if self.comm is None:  # closed already; __del__ closes again
            return
        if self._saved is not None:
            self._saved.close()
        for part in list(_find_own_widgets(self)):
            if part is not self:
                part.close()
        super().close()

    @property
    def page_title(self) -> str:
        """Title of the page that :meth:`to_html` writes."""
        return type(self).__name__.removesuffix("View")

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the view as one page that works from disk, without a kernel or network; return its path."""
        return write_page(self, path, self.page_title)

    def _ipython_display_(self) -> None:
        """Display the live view together with its picture for readers without a kernel."""
        if self._saved is None:
            self._saved = SavedOutput(self, draw_picture)
        self._saved.display()

    def _repr_mimebundle_(self, **kwargs: object) -> dict[str, object] | None:
        """Return the widget with its picture as HTML, for front ends that request both at once."""
        bundle: dict[str, object] | None = super()._repr_mimebundle_(**kwargs)
        if bundle is not None:
            bundle["text/html"] = draw_picture(self)
        return bundle


def _find_own_widgets(view: widgets.Widget) -> Iterator[widgets.Widget]:
    """Yield each widget that belongs to ``view`` alone once, starting with ``view``."""
    seen, waiting = {view.model_id}, [view]
    while waiting:
        widget = waiting.pop()
        yield widget
        for name in widget.keys:
            value = getattr(widget, name)
            for part in value if isinstance(value, list | tuple) else (value,):
                # Shared widgets are skipped together with their layouts.
                if not isinstance(part, widgets.Widget) or part.comm is None or controls.is_shared(part):
                    continue
                if part.model_id not in seen:
                    seen.add(part.model_id)
                    waiting.append(part)
