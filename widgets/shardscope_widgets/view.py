"""What all views share: closing one takes everything in it out of the kernel's registry."""

from __future__ import annotations

from collections.abc import Iterator

import ipywidgets as widgets

from shardscope_widgets import shared


class View(widgets.VBox):
    """A view that people put into a notebook, and that may be closed at any moment."""

    def close(self) -> None:
        """Close this view and all of its parts, which ipywidgets would keep for the kernel's lifetime."""
        if self.comm is None:  # closed already; __del__ closes once more
            return
        for part in list(_parts(self)):
            if part is not self and not shared.is_shared(part):
                part.close()
        super().close()


def _parts(view: widgets.Widget) -> Iterator[widgets.Widget]:
    """Every widget that ``view`` refers to, itself first, each once."""
    found, waiting = {view.model_id}, [view]
    while waiting:
        widget = waiting.pop()
        yield widget
        for name in widget.keys:
            value = getattr(widget, name)
            for part in value if isinstance(value, list | tuple) else (value,):
                if isinstance(part, widgets.Widget) and part.comm is not None and part.model_id not in found:
                    found.add(part.model_id)
                    waiting.append(part)
