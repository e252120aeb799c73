"""What a team already runs well, for advice to know: a toggle for each, any number of them on."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from shardscope.frameworks.registry import frameworks
from shardscope.planner.abilities import TITLES
from shardscope_widgets.kit.clickable import Clickable, IgnoredError

LABEL = "Your team runs well"


class FamiliarToggles(Clickable):
    """:attr:`names` are on, and are what ``ss.recommend`` takes as ``familiar_with``.

    Buttons in HTML, for ipywidgets' own do not tell a screen reader which of them are on.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        """``on_change`` is called after each press."""
        self.names: tuple[str, ...] = ()
        self._on_change = on_change
        super().__init__(self._toggle)
        self._write()

    def _toggle(self, name: str) -> None:
        if name not in TITLES:
            raise IgnoredError(name)
        # In one order, however they were pressed: the question is the same.
        self.names = tuple(each for each in TITLES if (each in self.names) != (each == name))
        self._write()
        self._on_change()

    def _write(self) -> None:
        toggles = "".join(_toggle(name, title, name in self.names) for name, title in TITLES.items())
        self.value = (
            f"<div class='ss-toggles'><span aria-hidden='true'>{LABEL}</span>"
            f"<div role='group' aria-label='{LABEL}'>{toggles}</div></div>"
        )


def _toggle(name: str, title: str, is_on: bool) -> str:
    # Accelerate trains nothing itself, and so is never what is advised.
    words = (
        f"{title} is advised where it does the same about as fast as another framework"
        if name in frameworks
        else f"Advice says whether {title} starts its plan, and through what"
    )
    return (
        f"<button type='button' class='ss-act' data-act='{name}' aria-pressed='{str(is_on).lower()}'"
        f" title='{escape(words, quote=True)}'>{escape(title)}</button>"
    )
