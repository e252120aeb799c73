"""The adapters that a run has trained: the button that merges them into their base, and the result."""

from __future__ import annotations

from html import escape
from pathlib import Path

import ipywidgets as widgets

import shardscope as ss
from shardscope.records.folder import FINAL, MERGED
from shardscope.runs.trained.merge import merge_with_progress
from shardscope.runs.trained.model_card import find_base_name
from shardscope.training.weights.weights_folder import ADAPTER_CONFIG
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_work import Progress, WorkPanel
from shardscope_widgets.kit.clickable import Clickable

LABEL = "Command that makes a GGUF of it, in a checkout of llama.cpp (not tested)"
TOOLTIP = "Write base and adapters as one model, which transformers opens, into the run folder"


class ModelPanel(widgets.HBox):
    """The adapters of one finished run, and the merged model once there is one.

    It always takes one line, so that the widgets below it do not move.
    """

    def __init__(self, run: ss.Run) -> None:
        self.run = run
        # The page copies the texts itself: no press reaches the kernel.
        self.work = WorkPanel("Merge adapters", TOOLTIP, self._start_merge, Clickable())
        super().__init__([self.work, self.work.words], layout=controls.share_layout())
        self.add_class("ss-model")
        merged = run.folder / MERGED
        if (merged / "config.json").is_file() and not merged.is_symlink():
            self._show_result(merged)
        else:
            base = find_base_name(run)
            self.work.show_message(f"LoRA adapters over {base}" if base else "LoRA adapters")

    def close(self) -> None:
        """Close the panel; a merge in progress ends, and nothing is left of it."""
        for part in (self.work, self.work.words, *self.work.children):
            part.close()
        super().close()

    def _start_merge(self) -> None:
        def merge(progress: Progress) -> Path:
            return merge_with_progress(self.run, None, progress)

        self.work.start(merge, self._show_result, lambda *_: None)

    def _show_result(self, merged: Path) -> None:
        self.work.words.value = render_result(self.run, merged)


def has_adapters(run: ss.Run) -> bool:
    """Return whether ``run`` has ended with adapters over a base that it has recorded."""
    model = run.model
    if model is None or run.status not in FINAL or not (model / ADAPTER_CONFIG).is_file():
        return False
    return isinstance((run.recorded_base or {}).get("weights"), str)


def render_result(run: ss.Run, merged: Path) -> str:
    """Return the merged model's path, and the command that makes a GGUF of it, each with a Copy button."""
    *_, command = run.gguf_command().splitlines()
    # As short as the user would write it; the absolute path is copied.
    shown = merged.relative_to(Path.cwd()) if merged.is_relative_to(Path.cwd()) else merged
    path = escape(str(merged), quote=True)
    return (
        f"<div>Merged into <code title='{path}'>{escape(str(shown))}</code> {_render_copy(path, 'the path')}"
        f"</div><details><summary>{LABEL}</summary><div class='ss-command'><code>{escape(command)}</code>"
        f"{_render_copy(escape(command, quote=True), 'the command')}</div></details>"
    )


def _render_copy(text: str, name: str) -> str:
    return f"<button type='button' class='ss-act' data-copy='{text}' aria-label='Copy {name}'>Copy</button>"
