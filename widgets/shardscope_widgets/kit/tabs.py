"""The row of tabs above the pages, with a count next to a tab's name where there is something to see."""

from __future__ import annotations

from collections.abc import Sequence

import anywidget
import traitlets

from shardscope_widgets.kit import controls
from shardscope_widgets.kit.front_end import front_end_text

MAX_ERROR = 400


class Tabs(anywidget.AnyWidget):
    """A tab bar whose ``value`` is the selected tab; ipywidgets' buttons have no ARIA roles or arrow keys."""

    _esm = front_end_text("kit/front_end", "keys.js", "tabs.js")
    names = traitlets.List(traitlets.Unicode()).tag(sync=True)
    value = traitlets.Unicode().tag(sync=True)
    error = traitlets.Unicode(help="Error of the latest request; empty if it succeeded.").tag(sync=True)
    badges = traitlets.Dict(help="Tab -> its count, what it counts, the worst severity.").tag(sync=True)

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names=list(names), value=names[0], layout=controls.share_layout())
        self.add_class("ss-tabs")

    def set_state(self, sync_data: dict[str, object]) -> None:
        """Apply a state sent by the page. Show an error for an unknown tab instead of raising."""
        try:
            super().set_state(sync_data)
        except traitlets.TraitError as refusal:
            self.error = f"Ignored: {str(refusal)[:MAX_ERROR]}"
        else:
            self.error = ""

    @traitlets.validate("value")
    def _check_tab(self, proposal: dict[str, str]) -> str:
        if proposal["value"] not in self.names:
            raise traitlets.TraitError(
                f"{proposal['value']!r} is not a tab; allowed: {', '.join(self.names)}"
            )
        return proposal["value"]

    def set_badge(self, name: str, count: int, meaning: str, severity: str) -> None:
        """Show ``count`` next to a tab's name, and its meaning in the tooltip; 0 removes it.

        ``severity``, the worst among the counted items, sets the colour.
        """
        # A new dictionary: traitlets sends only what differs, and would not see a change in place.
        badges = {key: value for key, value in self.badges.items() if key != name}
        self.badges = {**badges, name: [str(count), meaning, severity]} if count else badges
