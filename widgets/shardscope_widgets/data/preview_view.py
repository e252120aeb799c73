"""The preview of fine-tuning data: sentences, a histogram of lengths, and rows with learned tokens marked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html import escape

import shardscope as ss
from shardscope.training.examples.length_histogram import HISTOGRAM_STYLE, render_histogram
from shardscope.training.examples.preview import LengthAdvice, Preview
from shardscope_widgets.data.data_panel import READING, SHORTEN, render_length_button
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.clickable import Clickable, IgnoredError
from shardscope_widgets.kit.view import View


class PreviewView(View):
    """A preview as a view. ``on_length`` is called by the button for a better sequence length."""

    def __init__(self, on_length: Callable[[], None]) -> None:
        self._on_length = on_length
        self._preview: Preview | None = None
        self._plan: ss.Plan | None = None
        self.summary = Clickable(self._handle_action, "ss-data-summary")
        self.rows = controls.create_html()
        super().__init__([self.summary, self.rows], layout=controls.share_layout())
        self.add_class("ss-preview")

    def show(self, preview: Preview | None, advice: LengthAdvice | None) -> None:
        """Show ``preview``, and ``advice`` about its sequence length as a button; None: it is being read."""
        self._preview = preview
        self.summary.value = READING if preview is None else render_summary(preview, advice)
        self._draw_rows()

    def set_plan(self, plan: ss.Plan | None) -> None:
        """Show the rows as ``plan`` reads them: in windows, if it packs them."""
        if plan != self._plan:
            self._plan = plan
            self._draw_rows()

    def _draw_rows(self) -> None:
        preview, recipe = self._preview, self._plan.recipe if self._plan is not None else None
        if preview is None:
            self.rows.value = ""
            return
        # Windows of another length would hold other rows.
        is_packed = recipe is not None and recipe.packing and recipe.seq_len == preview.seq_len
        self.rows.value = (preview if is_packed else replace(preview, windows=())).rows_to_html()

    def _handle_action(self, act: str) -> None:
        if act != SHORTEN:
            raise IgnoredError(act)
        self._on_length()


def render_summary(preview: Preview, advice: LengthAdvice | None) -> str:
    """Return the sentences and the histogram as HTML."""
    sentences = "".join(f"<li>{escape(line)}</li>" for line in preview.sentences)
    return (
        f"<style>{HISTOGRAM_STYLE}</style><div><ul>{sentences}</ul>{render_length_button(advice)}</div>"
        f"{render_histogram(preview.lengths, preview.seq_len)}"
    )
