"""The preview of fine-tuning data: sentences, a histogram of lengths, and rows with learned tokens marked."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from shardscope.training.examples.preview import LengthAdvice, Preview
from shardscope_widgets.data.data_panel import READING, SHORTEN, render_length_button
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.clickable import Clickable, IgnoredError
from shardscope_widgets.kit.view import View

MAX_BARS = 32
MIN_BAR_PERCENT = 2
"""Height of the lowest bar that is not empty: one row among thousands is still visible."""
NEAR = 1.5
"""The axis is extended to a sequence length that is at most so many times the longest row."""


class PreviewView(View):
    """A preview as a view. ``on_length`` is called by the button for a better sequence length."""

    def __init__(self, on_length: Callable[[], None]) -> None:
        self._on_length = on_length
        self.summary = Clickable(self._handle_action, "ss-data-summary")
        self.rows = controls.create_html()
        super().__init__([self.summary, self.rows], layout=controls.share_layout())
        self.add_class("ss-preview")

    def show(self, preview: Preview | None, advice: LengthAdvice | None) -> None:
        """Show ``preview``, and ``advice`` about its sequence length as a button; None: it is being read."""
        if preview is None:
            self.summary.value, self.rows.value = READING, ""
            return
        self.summary.value = render_summary(preview, advice)
        self.rows.value = preview.rows_to_html()

    def _handle_action(self, act: str) -> None:
        if act != SHORTEN:
            raise IgnoredError(act)
        self._on_length()


def render_summary(preview: Preview, advice: LengthAdvice | None) -> str:
    """Return the sentences and the histogram as HTML."""
    sentences = "".join(f"<li>{escape(line)}</li>" for line in preview.sentences)
    return (
        f"<div><ul>{sentences}</ul>{render_length_button(advice)}</div>"
        f"{render_histogram(preview.lengths, preview.seq_len)}"
    )


def render_histogram(lengths: list[int], seq_len: int | None) -> str:
    """Return the lengths of rows as bars, with the sequence length as a line; longer rows are hatched."""
    longest = max(lengths)
    end = seq_len if seq_len is not None and longest < seq_len <= NEAR * longest else longest
    width = 1
    while width * MAX_BARS < end:
        width *= 2
    counts = [0] * -(-end // width)
    for length in lengths:
        counts[(length - 1) // width] += 1
    highest, axis = max(counts), len(counts) * width
    bars = "".join(
        _render_bar(number * width + 1, (number + 1) * width, count, highest, seq_len)
        for number, count in enumerate(counts)
    )
    line, label = "", "longer than all rows"
    if seq_len is not None and seq_len <= axis:
        position = f"{100 * seq_len / axis:.1f}%"
        side = "ss-left" if seq_len > axis / 2 else ""
        line = f"<b class='{side}' style='left:{position}'><span>sequence length {seq_len:,}</span></b>"
        label = f"at {seq_len:,}"
    elif seq_len is not None:
        line = (
            f"<b class='ss-left ss-beyond' style='left:100%'><span>sequence length {seq_len:,} →</span></b>"
        )
    name = f"Rows by length in tokens, up to {longest:,}; the sequence length is {label}"
    return (
        f"<figure class='ss-lengths' role='img' aria-label='{name}'>"
        f"<div class='ss-length-bars'>{bars}{line}</div>"
        f"<figcaption><span>1</span><span>tokens in a row</span><span>{axis:,}</span></figcaption></figure>"
    )


def _render_bar(first: int, last: int, count: int, highest: int, seq_len: int | None) -> str:
    height = max(MIN_BAR_PERCENT, 100 * count / highest) if count else 0
    is_cut = seq_len is not None and first > seq_len
    where = f"{first:,} token{'s' * (first > 1)}" if first == last else f"{first:,} to {last:,} tokens"
    title = f"{where}: {count:,} row{'s' * (count != 1)}{', cut' if is_cut and count else ''}"
    kind = " class='ss-cut'" if is_cut else ""
    return f"<i{kind} style='--share:{height:.1f}%' title='{title}'></i>"
