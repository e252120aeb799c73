"""A histogram of the lengths of rows, as HTML for previews in Python and in views."""

from __future__ import annotations

MAX_BARS = 32
MIN_BAR_PERCENT = 2
"""Height of the lowest bar that is not empty: one row among thousands is still visible."""
NEAR = 1.5
"""The axis is extended to a sequence length that is at most so many times the longest row."""

# The colours are those of a view; outside of one, those of JupyterLab.
HISTOGRAM_STYLE = """
.ss-lengths {
  margin: 0;
}
/* Room above the bars for the line's label. */
.ss-length-bars {
  position: relative;
  display: flex;
  gap: 1px;
  height: 96px;
  padding-top: 18px;
  border-bottom: 1px solid var(--ss-soft, var(--jp-ui-font-color2, #66707a));
}
/* As high as the chart, so that the whole column shows its number of rows on hover. */
.ss-length-bars > i {
  flex: 1 1 0;
  background: linear-gradient(var(--jp-ui-font-color2, #66707a), var(--jp-ui-font-color2, #66707a))
    bottom / 100% var(--share) no-repeat;
  forced-color-adjust: none;
}
.ss-length-bars > i.ss-cut {
  background-image: repeating-linear-gradient(135deg, var(--ss-warn, #b58900) 0 2px, transparent 2px 5px);
}
.ss-length-bars > b {
  position: absolute;
  top: 0;
  bottom: 0;
  border-left: 2px solid var(--ss-accent, var(--jp-brand-color1, #1f6feb));
  font-weight: 400;
}
/* At the right end of the axis the line would be outside of the chart. */
.ss-length-bars > b.ss-left {
  margin-left: -2px;
}
.ss-length-bars > b.ss-beyond {
  border-left-style: dotted;
}
.ss-length-bars > b > span {
  position: absolute;
  top: -1px;
  left: 5px;
  color: var(--ss-accent, var(--jp-brand-color1, #1f6feb));
  font-size: 12px;
  line-height: 16px;
  white-space: nowrap;
}
.ss-length-bars > b.ss-left > span {
  right: 7px;
  left: auto;
}
.ss-lengths figcaption {
  display: flex;
  justify-content: space-between;
  margin-top: 2px;
  color: var(--ss-soft, var(--jp-ui-font-color2, #66707a));
  font-size: 12px;
  font-variant-numeric: tabular-nums;
}
"""


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
