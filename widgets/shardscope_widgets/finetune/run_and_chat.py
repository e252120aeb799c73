"""The run of a fine-tune, and after its end a chat with its model, or how to continue without one."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets as widgets

import shardscope as ss
from shardscope.records.folder import FINAL
from shardscope.runs.resume import why_not_resumable
from shardscope_widgets.finetune.chat_view import ChatView
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_calls import call_in_loop, find_running_loop
from shardscope_widgets.kit.notice import Notice
from shardscope_widgets.run.view import RunView

RESUME = "This run saved a checkpoint and no model. Resume trains its remaining steps."
RESUME_IN_RUNS = (
    "This run saved a checkpoint and no model. Resume on the Runs tab trains its remaining steps."
)


def can_resume(run: ss.Run) -> bool:
    """Return whether a run that has ended can be continued from a checkpoint."""
    try:
        return why_not_resumable(run) is None
    except Exception:  # A damaged run.json: its view shows the reason.
        return False


class RunAndChat(widgets.VBox):
    """The run that was launched last. ``on_end(run)`` is called in its view's thread when it has ended.

    ``on_resume(run)`` continues a run that ended early; None: the Runs tab does.
    """

    def __init__(
        self, on_end: Callable[[ss.Run], None], on_resume: Callable[[ss.Run], None] | None = None
    ) -> None:
        self._on_end, self._on_resume = on_end, on_resume
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
            # Reads the checkpoint's files, so not in the kernel's own thread, in which widgets are created.
            can_continue = run.model is None and can_resume(run)
            call_in_loop(loop, lambda: self._offer_resume(run) if can_continue else self._open_chat(run))
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

    def _offer_resume(self, run: ss.Run) -> None:
        if self.comm is None or self.run is not run:
            return
        notice, resume = Notice(), self._on_resume
        if resume is None:
            notice.show_message(RESUME_IN_RUNS)
        else:
            notice.show_message(RESUME, {"Resume": lambda: resume(run)})
        self._chat_place.children = [notice]
