"""The base of all views: closing one leaves nothing behind, and a saved notebook shows its last state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ipywidgets as widgets

from shardscope_widgets.kit import controls
from shardscope_widgets.kit.saved_output import SavedOutput
from shardscope_widgets.kit.static_picture import draw_picture


class View(widgets.VBox):
    """A view that is put into a notebook, and that may be closed at any moment."""

    _saved: SavedOutput | None = None

    def close(self) -> None:
        """Close this view and all of its parts, which ipywidgets would keep for the kernel's lifetime."""
        if self.comm is None:  # closed already; __del__ closes once more
            return
        if self._saved is not None:
            self._saved.close()
        for part in list(_parts(self)):
            if part is not self:
                part.close()
        super().close()

    def _ipython_display_(self) -> None:
        """Show the live view, and beside it its picture for readers without a kernel."""
        if self._saved is None:
            self._saved = SavedOutput(self)
        self._saved.display()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any] | None:
        """Return the widget with its picture as HTML, for front ends that ask for both at once."""
        bundle: dict[str, Any] | None = super()._repr_mimebundle_(**kwargs)
        if bundle is not None:
            bundle["text/html"] = draw_picture(self)
        return bundle


def _parts(view: widgets.Widget) -> Iterator[widgets.Widget]:
    """Yield every widget that belongs to ``view`` alone, itself first, each once."""
    found, waiting = {view.model_id}, [view]
    while waiting:
        widget = waiting.pop()
        yield widget
        for name in widget.keys:
            value = getattr(widget, name)
            for part in value if isinstance(value, list | tuple) else (value,):
                # What several views share is not looked into: its own layout is theirs as well.
                if not isinstance(part, widgets.Widget) or part.comm is None or controls.is_shared(part):
                    continue
                if part.model_id not in found:
                    found.add(part.model_id)
                    waiting.append(part)
