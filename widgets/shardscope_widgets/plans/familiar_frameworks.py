"""Toggles for the frameworks that the team knows, an input of the advice; any number can be on."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from shardscope.frameworks.registry import frameworks
from shardscope.planner.abilities import TITLES
from shardscope_widgets.kit.clickable import Clickable, IgnoredError

LABEL = "Frameworks your team knows"


class FamiliarToggles(Clickable):
    """Toggle buttons; :attr:`names` are those that are on, for ``familiar_with`` of ``ss.recommend``.

    The group is one Tab stop, with arrow keys inside (``data-roving``). The buttons are HTML because
    ipywidgets' own toggle buttons have no ``aria-pressed``.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        """Create the toggles. ``on_change`` is called after each press."""
        self.names: tuple[str, ...] = ()
        self._on_change = on_change
        super().__init__(self._toggle_framework)
        self._draw_toggles()

    def _toggle_framework(self, name: str) -> None:
        if name not in TITLES:
            raise IgnoredError(name)
        # A fixed order: the order of presses does not change the question.
        self.names = tuple(title for title in TITLES if (title in self.names) != (title == name))
        self._draw_toggles()
        self._on_change()

    def _draw_toggles(self) -> None:
        toggles = "".join(_render_toggle(name, title, name in self.names) for name, title in TITLES.items())
        self.value = (
            f"<div class='ss-toggles'><span aria-hidden='true'>{LABEL}</span>"
            f"<div role='group' aria-label='{LABEL}' data-roving>{toggles}</div></div>"
        )


def _render_toggle(name: str, title: str, is_on: bool) -> str:
    # Accelerate launches other frameworks and is never recommended itself.
    tooltip = (
        f"Prefer {title} where another framework would be about as fast"
        if name in frameworks
        else f"Show whether {title} can launch the recommended plan"
    )
    return (
        f"<button type='button' class='ss-act' data-act='{name}' aria-pressed='{str(is_on).lower()}'"
        f" title='{escape(tooltip, quote=True)}'>{escape(title)}</button>"
    )
