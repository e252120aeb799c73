"""The input of a chat: Enter sends, Shift+Enter begins a new line."""

from __future__ import annotations

from collections.abc import Callable

import anywidget
import traitlets

from shardscope_widgets.kit.front_end import front_end_text

MAX_CHARACTERS = 100_000


class PromptBox(anywidget.AnyWidget):
    """A text area with a Send button. ``on_send(text)`` is called in the kernel's main thread.

    ipywidgets' own text boxes report the text and the Enter key in two messages, of which the second may come
    first.
    """

    _esm = front_end_text("kit/front_end", "keys.js") + front_end_text("finetune", "prompt_box.js")
    disabled = traitlets.Bool(False, help="Whether nothing can be sent.").tag(sync=True)
    busy = traitlets.Bool(False, help="Whether an answer is on its way: text can be typed, not sent.").tag(
        sync=True
    )

    def __init__(self, on_send: Callable[[str], None], **traits: object) -> None:
        super().__init__(**traits)
        self._on_send = on_send
        self.on_msg(self._handle_message)

    def _handle_message(self, _: object, content: object, buffers: object) -> None:
        text = content.get("send") if isinstance(content, dict) else None
        if isinstance(text, str) and 0 < len(text.strip()) <= MAX_CHARACTERS:
            self._on_send(text)
