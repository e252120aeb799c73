"""The run of a fine-tune, and after its end a chat with its model."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets as widgets

import shardscope as ss
from shardscope.records.folder import FINAL
from shardscope_widgets.finetune.chat_view import ChatView
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_calls import call_in_loop, find_running_loop
from shardscope_widgets.run.view import RunView


class RunAndChat(widgets.VBox):
    """The run that was launched last. ``on_end(run)`` is called in its view's thread when it has ended."""

    def __init__(self, on_end: Callable[[ss.Run], None]) -> None:
        self._on_end = on_end
        self.run: ss.Run | None = None
        self.run_view: RunView | None = None
        self.chat: ChatView | None = None
        # Filled with the first run: a chart sends megabytes of front end.
        self._run_place = widgets.VBox(layout=controls.share_layout())
        self._chat_place = widgets.VBox(layout=controls.share_layout())
        super().__init__([self._chat_place, self._run_place], layout=controls.share_layout())
        self.add_class("ss-run-and-chat")

    @property
    def is_active(self) -> bool:
        """Return whether the run has not ended yet."""
        return self.run is not None and self.run.status not in FINAL

    def watch(self, run: ss.Run) -> None:
        """Show ``run`` instead of the one before."""
        self.run = run
        parts, self._chat_place.children, self.chat = self._chat_place.children, [], None
        for part in parts:
            part.close()
        loop = find_running_loop()
        if self.run_view is not None:
            self._run_place.children = []
            self.run_view.close()

        def end(run: ss.Run) -> None:
            # Widgets are created in the kernel's own thread.
            call_in_loop(loop, lambda: self._open_chat(run))
            self._on_end(run)

        self.run_view = RunView(run, on_end=end, samples_first=True)
        self._run_place.children = [self.run_view]

    def _open_chat(self, run: ss.Run) -> None:
        # Closed, or another run started meanwhile.
        if self.comm is None or self.run is not run:
            return
        if run.model is not None and self.chat is None:
            # The run's view below has the button that merges the adapters.
            self.chat = ChatView(run, with_merge=False)
            self._chat_place.children = [controls.create_html("<h2>Talk to it</h2>"), self.chat]
