"""Widgets that share layouts and styles, because ipywidgets creates one or two for each widget.

A reloaded page must load every model within two seconds, or JupyterLab reports "model not found". Sharing
reduces a Studio from 700 models to 200. Widgets whose layout changes later get their own layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar
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


def share_layout(**traits: str) -> widgets.Layout:
    """Return the shared layout with these traits, which must not be modified."""
    return _reuse(widgets.Layout, **traits)


def share_fixed_layout(width: str = "auto") -> widgets.Layout:
    """Return a layout of fixed width that does not shrink."""
    return share_layout(flex="0 0 auto", width=width, min_width="0")


def share_filling_layout() -> widgets.Layout:
    """Return a layout that fills the available width."""
    return share_layout(flex="1 1 0", width="auto", min_width="0")


def add_classes(widget: widgets.DOMWidget, *names: str) -> None:
    """Add the classes ``names`` to ``widget``."""
    for name in names:
        widget.add_class(name)


def set_class(widget: widgets.DOMWidget, name: str, is_set: object) -> None:
    """Add the class ``name`` to ``widget`` if ``is_set`` is true, else remove it."""
    (widget.add_class if is_set else widget.remove_class)(name)


def show_if(widget: widgets.DOMWidget, is_shown: object) -> None:
    """Show ``widget`` if ``is_shown`` is true, else hide it; its layout may be shared."""
    set_class(widget, "ss-off", not is_shown)


def create_html(value: str = "", *classes: str, **traits: object) -> widgets.HTML:
    """Return an HTML widget, on a shared layout unless one is given."""
    widget = widgets.HTML(
        value,
        **{"layout": share_layout(), "style": _reuse(widgets.widgets.widget_string.HTMLStyle), **traits},
    )
    add_classes(widget, *classes)
    return widget


def stack_vertically(*children: widgets.Widget) -> widgets.VBox:
    """Return ``children`` stacked vertically."""
    return widgets.VBox(list(children), layout=share_layout())


def create_label(text: str, width: str = "auto") -> widgets.Label:
    """Return a plain-text label for an input."""
    style = _reuse(widgets.widgets.widget_string.LabelStyle)
    return widgets.Label(text, layout=share_fixed_layout(width), style=style)


def create_dropdown(**traits: object) -> widgets.Dropdown:
    """Return a dropdown list with one choice."""
    style = _reuse(widgets.widgets.widget_description.DescriptionStyle)
    return widgets.Dropdown(**{"layout": share_filling_layout(), "style": style, **traits})


def create_text_box(value: object, tooltip: str, width: str | None = None, **traits: object) -> widgets.Text:
    """Return a text box that reports on Enter or on losing focus, with a name for screen readers."""
    style = _reuse(widgets.widgets.widget_string.TextStyle)
    layout = share_filling_layout() if width is None else share_fixed_layout(width)
    # continuous_update is off: half of a number would be read as another plan.
    defaults = {"continuous_update": False, "layout": layout, "style": style, "tooltip": tooltip, **traits}
    return widgets.Text(str(value), **defaults)


def read_again(box: widgets.Text, read: Callable[[], object]) -> None:
    """Call ``read`` at each Enter in ``box``, also if the text is the same: its file may not be."""
    box.add_class("ss-reads-again")  # The front end reports Enter without a change only of such boxes.
    box.on_msg(lambda _, content, __: read() if content.get("event") == "submit" else None)


def create_text_area(tooltip: str, **traits: object) -> widgets.Textarea:
    """Return an input of several lines that reports on losing focus."""
    style = _reuse(widgets.widgets.widget_string.TextStyle)
    return widgets.Textarea(
        **{"continuous_update": False, "rows": 2, "layout": share_filling_layout(), "style": style, **traits},
        tooltip=tooltip,
    )


def replace_options(control: widgets.Dropdown | widgets.ToggleButtons, options: Sequence[object]) -> None:
    """Offer other options, and keep the value, which is one of them."""
    # Setting options selects the first one (ipywidgets 8.1, _Selection._propagate_options).
    if list(control.options) != list(options):
        value, control.options = control.value, options
        control.value = value


def create_segments(options: Sequence[tuple[str, object]], name: str) -> widgets.ToggleButtons:
    """Return a segmented control: a few choices in a row, one of them selected."""
    buttons = widgets.ToggleButtons(
        options=options,
        # The front end takes it for the name of the group (kit/front_end/names.js).
        tooltip=name,
        tooltips=[f"{name}: {label}" for label, _ in options],
        layout=share_filling_layout(),
        style=_reuse(widgets.ToggleButtonsStyle, button_width="auto"),
    )
    buttons.add_class("ss-seg")
    return buttons


def create_button(description: str, *classes: str, **traits: object) -> widgets.Button:
    """Return a button with these CSS classes, on a shared layout unless one is given."""
    button = widgets.Button(
        description=description,
        **{"layout": share_layout(), "style": _reuse(widgets.ButtonStyle), **traits},
    )
    add_classes(button, *classes)
    return button
