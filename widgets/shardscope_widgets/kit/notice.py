"""A notice with buttons, which the user can dismiss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from shardscope_widgets.kit.clickable import Clickable, IgnoredError

DISMISS = "dismiss"
WRONG_INPUT = "Correct the input marked in red first."


class Notice(Clickable):
    """A notice, empty until :meth:`show_message` is called, with a button that dismisses it."""

    def __init__(self) -> None:
        self._actions: dict[str, Callable[[], None]] = {}
        super().__init__(self._handle_action, "ss-notice")

    def show_message(
        self, message: str, actions: Mapping[str, Callable[[], None]] | None = None, *, is_error: bool = False
    ) -> None:
        """Show ``message`` with one button per action; an empty ``message`` dismisses the notice."""
        self._actions = dict(actions or {})
        if not message:
            self.value = ""
            return
        role = "alert" if is_error else "status"
        kind = " class='ss-error'" if is_error else ""
        buttons = "".join(_render_button(name, escape(name)) for name in self._actions)
        dismiss = _render_button(DISMISS, "✕", "aria-label='Dismiss'")
        self.value = f"<span role='{role}'{kind}>{escape(message)}</span>{buttons}{dismiss}"

    def _handle_action(self, name: str) -> None:
        if name == DISMISS:
            self.show_message("")
            return
        if name not in self._actions:
            raise IgnoredError(name)
        do = self._actions[name]
        self.show_message("")
        do()


def _render_button(act: str, label: str, attributes: str = "") -> str:
    name = escape(act, quote=True)
    return f"<button type='button' class='ss-act' data-act='{name}' {attributes}>{label}</button>"
