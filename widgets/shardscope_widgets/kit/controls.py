"""Widgets that share layouts and styles, for each of ipywidgets' widgets would bring one or two of its own.

A page that is loaded anew must have every model within two seconds, or JupyterLab says "model not found":
a Studio has 200 of them this way, instead of 700. What changes later gets a layout of its own.
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
    """``widget``, which from now on belongs to several views: no one of them closes it."""
    widget.belongs_to_several = True
    return widget


def is_shared(widget: widgets.Widget) -> bool:
    """Whether other views may use ``widget`` as well."""
    # No set of them: plotly's figures have no hash.
    return getattr(widget, "belongs_to_several", False)


def _shared(kind: type[Shared], **traits: str) -> Shared:
    found = _made(kind, tuple(sorted(traits.items())))
    if found.comm is None:  # closed with all widgets: Widget.close_all()
        _made.cache_clear()
        found = _made(kind, tuple(sorted(traits.items())))
    return found


def layout(**traits: str) -> widgets.Layout:
    """The layout with these traits. Nobody changes it."""
    return _shared(widgets.Layout, **traits)


def fixed(width: str = "auto") -> widgets.Layout:
    """As wide as it says, whatever stands beside it."""
    return layout(flex="0 0 auto", width=width, min_width="0")


def filling() -> widgets.Layout:
    """As wide as its place."""
    return layout(flex="1 1 0", width="auto", min_width="0")


def html(value: str = "", *classes: str, **traits: Any) -> widgets.HTML:
    """Words with markup, on a shared layout unless one is given."""
    words = widgets.HTML(
        value, **{"layout": layout(), "style": _shared(widgets.widgets.widget_string.HTMLStyle), **traits}
    )
    for name in classes:
        words.add_class(name)
    return words


def vertical(*children: widgets.Widget) -> widgets.VBox:
    """Return ``children`` below one another."""
    return widgets.VBox(list(children), layout=layout())


def label(text: str, width: str = "auto") -> widgets.Label:
    """Plain words beside an input."""
    style = _shared(widgets.widgets.widget_string.LabelStyle)
    return widgets.Label(text, layout=fixed(width), style=style)


def dropdown(**traits: Any) -> widgets.Dropdown:
    """A list to choose one of."""
    style = _shared(widgets.widgets.widget_description.DescriptionStyle)
    return widgets.Dropdown(**{"layout": filling(), "style": style, **traits})


def text(value: object, tooltip: str, width: str | None = None, **traits: Any) -> widgets.Text:
    """A text box that reports once the person is done (Enter or leaving it), named for screen readers."""
    style = _shared(widgets.widgets.widget_string.TextStyle)
    place = filling() if width is None else fixed(width)
    given = {"continuous_update": False, "layout": place, "style": style, "tooltip": tooltip, **traits}
    return widgets.Text(str(value), **given)


def segments(options: list[tuple[str, Any]], name: str) -> widgets.ToggleButtons:
    """A few choices side by side, one of them chosen."""
    buttons = widgets.ToggleButtons(
        options=options,
        tooltips=[f"{name}: {words}" for words, _ in options],
        layout=filling(),
        style=_shared(widgets.ToggleButtonsStyle, button_width="auto"),
    )
    buttons.add_class("ss-seg")
    return buttons


def button(description: str, *classes: str, **traits: Any) -> widgets.Button:
    """A button that looks as its classes say, on a shared layout unless one is given."""
    made = widgets.Button(
        description=description,
        **{"layout": layout(), "style": _shared(widgets.ButtonStyle), **traits},
    )
    for name in classes:
        made.add_class(name)
    return made
