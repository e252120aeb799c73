"""What all views share: closing one leaves nothing, and where no kernel is its words are still read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ipywidgets as widgets

from shardscope_widgets.kit import controls
from shardscope_widgets.kit.clickable import Clickable
from shardscope_widgets.run.log_pane import LogPane

WORDS = (widgets.HTML, Clickable, LogPane)
"""Widgets whose value is HTML."""


class View(widgets.VBox):
    """A view that people put into a notebook, and that may be closed at any moment."""

    def close(self) -> None:
        """Close this view and all of its parts, which ipywidgets would keep for the kernel's lifetime."""
        if self.comm is None:  # closed already; __del__ closes once more
            return
        for part in list(_parts(self)):
            if part is not self:
                part.close()
        super().close()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any] | None:
        """With the words as plain HTML, for GitHub and for notebooks of others, which show no widgets."""
        bundle: dict[str, Any] | None = super()._repr_mimebundle_(**kwargs)
        if bundle is not None:
            bundle["text/html"] = "\n".join(f"<div>{words}</div>" for words in _words(self))
        return bundle


def _words(widget: widgets.Widget) -> Iterator[str]:
    """The HTML in sight, from the top to the bottom."""
    if not isinstance(widget, (widgets.Box, *WORDS)) or widget.layout.display == "none":
        return
    if not isinstance(widget, widgets.Box):
        yield from filter(None, [widget.value])
        return
    for child in widget.children:
        yield from _words(child)


def _parts(view: widgets.Widget) -> Iterator[widgets.Widget]:
    """Every widget that belongs to ``view`` alone, itself first, each once."""
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
