"""Widgets that share layouts and styles, because ipywidgets creates one or two for each widget.

A reloaded page must load every model within two seconds, or JupyterLab reports "model not found". Sharing
reduces a Studio from 700 models to 200. Widgets whose layout changes later get their own layout.
"""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakValueDictionary

import ipywidgets as widgets

Shared = TypeVar("Shared", bound=widgets.Widget)
_by_traits: dict[tuple[type[widgets.Widget], tuple[tuple[str, str], ...]], widgets.Widget] = {}
"""The shared layouts and styles by class and traits."""
# By id: plotly's figures are not hashable.
_shared_by_id: WeakValueDictionary[int, widgets.Widget] = WeakValueDictionary()


def mark_as_shared(widget: Shared) -> Shared:
    """Mark ``widget`` as used by several views, so that none of them closes it, and return it."""
    _shared_by_id[id(widget)] = widget
    return widget


def is_shared(widget: widgets.Widget) -> bool:
    """Return whether other views may use ``widget`` as well."""
    return _shared_by_id.get(id(widget)) is widget


def _reuse(kind: type[Shared], **traits: str) -> Shared:
    key = (kind, tuple(sorted(traits.items())))
    widget = _by_traits.get(key)
    # It has no comm if Widget.close_all() closed it.
    if not isinstance(widget, kind) or widget.comm is None:
        widget = mark_as_shared(kind(**traits))
        _by_traits[key] = widget
    return widget


def layout(**traits: str) -> widgets.Layout:
    """Return the shared layout with these traits, which must not be modified."""
    return _reuse(widgets.Layout, **traits)


def fixed(width: str = "auto") -> widgets.Layout:
    """Return a layout of fixed width that does not shrink."""
    return layout(flex="0 0 auto", width=width, min_width="0")


def filling() -> widgets.Layout:
    """Return a layout that fills the available width."""
    return layout(flex="1 1 0", width="auto", min_width="0")


def html(value: str = "", *classes: str, **traits: Any) -> widgets.HTML:
    """Return an HTML widget, on a shared layout unless one is given."""
    words = widgets.HTML(
        value,
        **{"layout": layout(), "style": _reuse(widgets.widgets.widget_string.HTMLStyle), **traits},
    )
    for name in classes:
        words.add_class(name)
    return words


def vertical(*children: widgets.Widget) -> widgets.VBox:
    """Return ``children`` stacked vertically."""
    return widgets.VBox(list(children), layout=layout())


def label(text: str, width: str = "auto") -> widgets.Label:
    """Return a plain-text label for an input."""
    style = _reuse(widgets.widgets.widget_string.LabelStyle)
    return widgets.Label(text, layout=fixed(width), style=style)


def dropdown(**traits: Any) -> widgets.Dropdown:
    """Return a dropdown list with one choice."""
    style = _reuse(widgets.widgets.widget_description.DescriptionStyle)
    return widgets.Dropdown(**{"layout": filling(), "style": style, **traits})


def text(value: object, tooltip: str, width: str | None = None, **traits: Any) -> widgets.Text:
    """Return a text box that reports on Enter or on losing focus, with a name for screen readers."""
    style = _reuse(widgets.widgets.widget_string.TextStyle)
    place = filling() if width is None else fixed(width)
    given = {"continuous_update": False, "layout": place, "style": style, "tooltip": tooltip, **traits}
    return widgets.Text(str(value), **given)


def segments(options: list[tuple[str, Any]], name: str) -> widgets.ToggleButtons:
    """Return a segmented control: a few choices in a row, one of them selected."""
    buttons = widgets.ToggleButtons(
        options=options,
        tooltips=[f"{name}: {words}" for words, _ in options],
        layout=filling(),
        style=_reuse(widgets.ToggleButtonsStyle, button_width="auto"),
    )
    buttons.add_class("ss-seg")
    return buttons


def button(description: str, *classes: str, **traits: Any) -> widgets.Button:
    """Return a button with these CSS classes, on a shared layout unless one is given."""
    made = widgets.Button(
        description=description,
        **{"layout": layout(), "style": _reuse(widgets.ButtonStyle), **traits},
    )
    for name in classes:
        made.add_class(name)
    return made
