"""Widgets that share layouts and styles, because ipywidgets creates one or two for each widget.

A reloaded page must load every model within two seconds, or JupyterLab reports "model not found". Sharing
reduces a Studio from 700 models to 200. Widgets whose layout changes later get their own layout.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import ipywidgets as widgets

Shared = TypeVar("Shared", bound=widgets.Widget)


@cache
def _made(kind: type[Shared], traits: tuple[tuple[str, str], ...]) -> Shared:
    return keep(kind(**dict(traits)))


def keep(widget: Shared) -> Shared:
    """Mark ``widget`` as shared by several views, so that none of them closes it, and return it."""
    widget.belongs_to_several = True
    return widget


def is_shared(widget: widgets.Widget) -> bool:
    """Return whether other views may use ``widget`` as well."""
    # Not a set: plotly's figures are not hashable.
    return getattr(widget, "belongs_to_several", False)


def _shared(kind: type[Shared], **traits: str) -> Shared:
    found = _made(kind, tuple(sorted(traits.items())))
    if found.comm is None:  # closed with all other widgets by Widget.close_all()
        _made.cache_clear()
        found = _made(kind, tuple(sorted(traits.items())))
    return found


def layout(**traits: str) -> widgets.Layout:
    """Return the shared layout with these traits, which must not be modified."""
    return _shared(widgets.Layout, **traits)


def fixed(width: str = "auto") -> widgets.Layout:
    """Return a layout of fixed width that does not shrink."""
    return layout(flex="0 0 auto", width=width, min_width="0")


def filling() -> widgets.Layout:
    """Return a layout that fills the available width."""
    return layout(flex="1 1 0", width="auto", min_width="0")


def html(value: str = "", *classes: str, **traits: Any) -> widgets.HTML:
    """Return an HTML widget, on a shared layout unless one is given."""
    words = widgets.HTML(
        value, **{"layout": layout(), "style": _shared(widgets.widgets.widget_string.HTMLStyle), **traits}
    )
    for name in classes:
        words.add_class(name)
    return words


def vertical(*children: widgets.Widget) -> widgets.VBox:
    """Return ``children`` stacked vertically."""
    return widgets.VBox(list(children), layout=layout())


def label(text: str, width: str = "auto") -> widgets.Label:
    """Return a plain-text label for an input."""
    style = _shared(widgets.widgets.widget_string.LabelStyle)
    return widgets.Label(text, layout=fixed(width), style=style)


def dropdown(**traits: Any) -> widgets.Dropdown:
    """Return a dropdown list with one choice."""
    style = _shared(widgets.widgets.widget_description.DescriptionStyle)
    return widgets.Dropdown(**{"layout": filling(), "style": style, **traits})


def text(value: object, tooltip: str, width: str | None = None, **traits: Any) -> widgets.Text:
    """Return a text box that reports on Enter or on losing focus, with a name for screen readers."""
    style = _shared(widgets.widgets.widget_string.TextStyle)
    place = filling() if width is None else fixed(width)
    given = {"continuous_update": False, "layout": place, "style": style, "tooltip": tooltip, **traits}
    return widgets.Text(str(value), **given)


def segments(options: list[tuple[str, Any]], name: str) -> widgets.ToggleButtons:
    """Return a segmented control: a few choices in a row, one of them selected."""
    buttons = widgets.ToggleButtons(
        options=options,
        tooltips=[f"{name}: {words}" for words, _ in options],
        layout=filling(),
        style=_shared(widgets.ToggleButtonsStyle, button_width="auto"),
    )
    buttons.add_class("ss-seg")
    return buttons


def button(description: str, *classes: str, **traits: Any) -> widgets.Button:
    """Return a button with these CSS classes, on a shared layout unless one is given."""
    made = widgets.Button(
        description=description,
        **{"layout": layout(), "style": _shared(widgets.ButtonStyle), **traits},
    )
    for name in classes:
        made.add_class(name)
    return made
