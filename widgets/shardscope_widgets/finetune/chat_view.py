"""The view of a chat: one input, and the answers of the base and of the tuned model side by side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import anywidget
import ipywidgets as widgets
import traitlets

import shardscope as ss
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.front_end import front_end_text
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
from shardscope_widgets.run.log_pane import LogPane
from shardscope_widgets.run.model_panel import ModelPanel, has_adapters

if TYPE_CHECKING:
    from shardscope.runs.trained.chat import Chat

MAX_CHARACTERS = 100_000
"""Maximum length of a message."""
SECONDS_BETWEEN_DRAWINGS = 0.1
"""Minimum seconds between two drawings of an answer: tokens may come faster."""
NO_MODEL = "This run has no model to chat with: it was launched without export=True, or has not finished."
WAITING = "<span class='ss-hint'>loading the model …</span>"


class ChatView(View):
    """Chats with ``run.model`` and, side by side, with the model that the run started from.

    Each model is in a process of its own, from the first message until the view is closed.
    ``with_merge`` adds the button that merges adapters into their base.
    """

    def __init__(self, run: ss.Run, *, with_merge: bool = True) -> None:
        self._check_shown(run, ss.Run)
        self.run = run
        base = (run.recorded_base or {}).get("weights")
        base_name = Path(base).name if isinstance(base, str) else ""
        self.columns = (
            ChatColumn("Base", base_name, lambda: run.chat(base=True)),
            ChatColumn("Tuned", run.name, run.chat),
        )
        self._changing = threading.Lock()
        self._num_answering = 0
        self.box = PromptBox(self.ask, layout=controls.share_layout())
        self.stop_button = controls.create_button(
            "Stop", "ss-ghost", tooltip="End both answers here", disabled=True
        )
        self.stop_button.on_click(lambda _: self.stop())
        self.clear_button = controls.create_button("Clear", "ss-ghost", tooltip="Forget the conversation")
        self.clear_button.on_click(lambda _: self.clear())
        pair = widgets.Box(list(self.columns), layout=controls.share_layout())
        pair.add_class("ss-chat-columns")
        line = widgets.HBox([self.box, self.stop_button, self.clear_button], layout=controls.share_layout())
        line.add_class("ss-chat-line")
        self.hint = controls.create_html("", "ss-hint")
        if run.model is None:
            self.hint.value = NO_MODEL
            self.box.disabled = self.clear_button.disabled = True
        model = [ModelPanel(run)] if with_merge and has_adapters(run) else []
        super().__init__([Sheet("run", "finetune"), pair, line, self.hint, *model])
        self.add_class("ss-root")
        self.add_class("ss-chat")

    def ask(self, text: str) -> None:
        """Send ``text`` to both models, unless they are still answering; returns at once."""
        with self._changing:
            if self._num_answering or self.box.disabled:
                return
            self._num_answering = len(self.columns)
            self._show_busy(True)
        for column in self.columns:
            # Threads, because both answer at the same time and cells may block the kernel's main thread.
            threading.Thread(
                target=self._answer, args=(column, text), daemon=True, name="shardscope-chat"
            ).start()

    def stop(self) -> None:
        """End both answers where they are."""
        for column in self.columns:
            column.stop()

    def clear(self) -> None:
        """Forget the conversation, and stop the current answers."""
        for column in self.columns:
            column.clear()

    def close(self) -> None:
        """Close the view and end the processes of both models."""
        if self.comm is None:  # never opened, or closed already
            return
        for column in self.columns:
            column.end()
        super().close()

    def _answer(self, column: ChatColumn, text: str) -> None:
        try:
            column.answer(text)
        finally:
            with self._changing:
                self._num_answering -= 1
                if not self._num_answering:
                    self._show_busy(False)

    def _show_busy(self, is_busy: bool) -> None:
        if self.comm is None:  # Closed meanwhile.
            return
        self.box.busy = is_busy
        self.stop_button.disabled = not is_busy


class ChatColumn(widgets.VBox):
    """One model's side of the conversation. ``answer`` runs in a thread, the other methods in any."""

    def __init__(self, title: str, name: str, start: Callable[[], Chat]) -> None:
        self._start = start
        self._chat: Chat | None = None
        self._lock = threading.Lock()
        self._turns: list[str] = []
        """Finished turns as HTML."""
        self._num_clears = 0
        """An answer that began before the last clearing is not shown."""
        self._is_stopped = self._has_ended = False
        heading = f"<h2>{escape(title)} <span class='ss-hint'>{escape(name)}</span></h2>"
        self.heading = controls.create_html(heading)
        self.pane = LogPane(
            name=f"answers of the {title.lower()} model",
            follow_label="New text: follow the answer",
            layout=controls.share_layout(),
        )
        super().__init__([self.heading, self.pane], layout=controls.share_layout())

    def answer(self, text: str) -> None:
        """Show ``text`` and the model's answer to it, until that ends."""
        with self._lock:
            number, self._is_stopped = self._num_clears, False
            # The texts are data: escaped, never interpreted.
            self._turns.append(f"<b class='ss-asked'>You</b>\n{escape(text)}\n\n<b>Model</b>\n")
        self._show_answer(number, WAITING)
        answer, drawn = "", 0.0
        try:
            chat = self._open_chat()
            for piece in chat.send(text):
                answer += piece
                if self._is_stopped:
                    break
                if time.monotonic() - drawn >= SECONDS_BETWEEN_DRAWINGS:
                    drawn = time.monotonic()
                    self._show_answer(number, escape(answer))
            nothing = "stopped before an answer" if self._is_stopped else "an empty answer"
            shown = escape(answer) if answer.strip() else f"<span class='ss-hint'>{nothing}</span>"
        except Exception as error:  # An exception in a thread is not shown in a notebook.
            shown = f"{escape(answer)}<span class='ss-error' role='alert'>{escape(str(error))}</span>"
        self._show_answer(number, f"{shown}\n\n", ended=True)

    def stop(self) -> None:
        """End the current answer."""
        with self._lock:
            self._is_stopped = True
            if self._chat is not None:
                self._chat.stop()

    def clear(self) -> None:
        """Forget the conversation."""
        with self._lock:
            self._is_stopped = True
            self._num_clears += 1
            self._turns = []
            if self._chat is not None:
                self._chat.reset()
            self.pane.value = ""

    def end(self) -> None:
        """End the model's process."""
        with self._lock:
            self._has_ended = True
            if self._chat is not None:
                self._chat.close()

    def _open_chat(self) -> Chat:
        with self._lock:
            if self._has_ended:
                raise RuntimeError("The view was closed.")
            if self._chat is None or self._chat.is_closed:
                self._chat = self._start()
            return self._chat

    def _show_answer(self, number: int, answer: str, *, ended: bool = False) -> None:
        with self._lock:
            if number != self._num_clears or self._has_ended:
                return
            if ended:
                self._turns.append(answer)
                answer = ""
            self.pane.value = "".join(self._turns) + answer


# ---- The input


class PromptBox(anywidget.AnyWidget):
    """A text area with a Send button: Enter sends, Shift+Enter begins a new line.

    ``on_send(text)`` is called in the kernel's main thread.

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
