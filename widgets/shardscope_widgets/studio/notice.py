"""One line under the Studio's head: what an action did or why it failed, with buttons for what comes next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from shardscope_widgets.kit.clickable import Clickable, IgnoredError

DISMISS = "dismiss"


class Notice(Clickable):
    """Empty until :meth:`say`; a cross takes the line away."""

    def __init__(self) -> None:
        self._actions: dict[str, Callable[[], None]] = {}
        super().__init__(self._act, "ss-notice")

    def say(
        self, words: str, actions: Mapping[str, Callable[[], None]] | None = None, *, is_error: bool = False
    ) -> None:
        """Show ``words`` and a button for each of ``actions``; empty words take the line away."""
        self._actions = dict(actions or {})
        if not words:
            self.value = ""
            return
        role = "alert" if is_error else "status"
        kind = " class='ss-error'" if is_error else ""
        buttons = "".join(_button(name, escape(name)) for name in self._actions)
        dismiss = _button(DISMISS, "✕", "aria-label='Dismiss'")
        self.value = f"<span role='{role}'{kind}>{escape(words)}</span>{buttons}{dismiss}"

    def _act(self, name: str) -> None:
        if name == DISMISS:
            self.say("")
            return
        if name not in self._actions:
            raise IgnoredError(name)
        do = self._actions[name]
        self.say("")
        do()


def _button(act: str, label: str, attributes: str = "") -> str:
    name = escape(act, quote=True)
    return f"<button type='button' class='ss-act' data-act='{name}' {attributes}>{label}</button>"
