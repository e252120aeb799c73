"""HTML of the rows and packed windows of a preview, with the tokens that bear loss marked."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.training.examples.preview import PreviewRow, PreviewWindow

MAX_SHOWN_TOKENS = 1500
"""Tokens of one row that the HTML shows."""

# Colours are the page's own, with a blue that has enough contrast on JupyterLab's light and dark background.
# Learned tokens are underlined as well, for those who see no difference in colour.
STYLE = """
.shardscope-preview { font: 13px/1.5 var(--jp-ui-font-family, sans-serif);
  color: var(--jp-ui-font-color1, inherit); }
.shardscope-preview ul { margin: 0 0 10px; padding-left: 18px; }
.shardscope-preview mark { background: rgba(58, 134, 255, 0.2); color: inherit;
  border-bottom: 2px solid #3a86ff; }
.shardscope-preview .legend { margin: 0 0 8px; font-size: 12px;
  color: var(--jp-ui-font-color2, inherit); }
.shardscope-preview .legend mark { padding: 0 4px; }
.shardscope-preview .row { margin: 0 0 10px; border-radius: 5px; overflow: hidden;
  border: 1px solid var(--jp-border-color2, rgba(128, 128, 128, 0.4)); }
.shardscope-preview .title { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 12px;
  padding: 3px 10px; font-size: 12px; font-variant-numeric: tabular-nums;
  border-bottom: 1px solid var(--jp-border-color2, rgba(128, 128, 128, 0.4)); }
.shardscope-preview .title strong { font-weight: 600; }
.shardscope-preview .title span { color: var(--jp-ui-font-color2, inherit); }
.shardscope-preview .chart { max-width: 640px; margin: 0 0 14px; }
.shardscope-preview .part + .part {
  border-top: 1px dashed var(--jp-border-color1, rgba(128, 128, 128, 0.7)); }
.shardscope-preview .part > p { margin: 0; padding: 4px 10px 0; font-size: 12px;
  color: var(--jp-ui-font-color2, inherit); }
.shardscope-preview .row pre { margin: 0; padding: 6px 10px; max-height: 240px; overflow: auto;
  background: none;
  font: 12.5px/1.7 var(--jp-code-font-family, monospace); color: inherit; white-space: pre-wrap;
  word-break: normal; overflow-wrap: anywhere; }
.shardscope-preview i { font-size: 0.86em; font-style: normal; color: var(--jp-ui-font-color2, inherit); }
.shardscope-preview mark i { color: inherit; }
"""
# Words are apart without the style sheet too, which GitHub's viewer removes: not "Row 151 tokens".
LEGEND = (
    '<p class="legend"><mark>learned</mark> bears loss · context: read, not learned · '
    "<i>&lt;special token&gt;</i> · <i>↵</i> learned line break</p>"
)


def render_window(number: int, window: PreviewWindow) -> str:
    """Return a window as HTML, with a line between its rows."""
    parts, num_shown = list[str](), 0
    for row in window.rows:
        if num_shown >= MAX_SHOWN_TOKENS:
            parts.append(f'<div class="part"><p>… {len(window.rows) - len(parts):,} more rows</p></div>')
            break
        num_shown += len(row.ids)
        counts = f"{len(row.ids):,} tokens, {sum(row.bears_loss):,} learned"
        text = f"Row {row.index + 1:,}: {counts}; positions 0 to {len(row.ids) - 1:,}"
        parts.append(f'<div class="part"><p>{text}</p><pre>\n{_render_tokens(row)}</pre></div>')
    num_tokens = sum(len(row.ids) for row in window.rows)
    counts = f"{len(window.rows):,} rows, {num_tokens:,} tokens, {window.num_padding:,} of padding"
    title = f'<div class="title"><strong>Window {number}</strong> <span>{counts}</span></div>'
    return f'<div class="row">{title}{"".join(parts)}</div>'


def render_row(row: PreviewRow) -> str:
    """Return a row as HTML: its number, its counts and its tokens."""
    counts = f"{len(row.ids):,} tokens, {sum(row.bears_loss):,} learned"
    if row.num_left_out:
        counts += f", and about {row.num_left_out:,} more"
    name = f"Row {row.index + 1:,}" + (f", {row.side}" if row.side else "")
    title = f'<div class="title"><strong>{name}</strong> <span>{counts}</span></div>'
    # The parser drops a line break right after <pre>: a row that starts with one needs a second.
    return f'<div class="row">{title}<pre>\n{_render_tokens(row)}</pre></div>'


def _render_tokens(row: PreviewRow) -> str:
    pieces, learned = [], False
    tokens = zip(row.tokens, row.bears_loss, row.is_special, strict=True)
    for token, bears_loss, is_special in list(tokens)[:MAX_SHOWN_TOKENS]:
        if bears_loss != learned:
            pieces.append("<mark>" if bears_loss else "</mark>")
            learned = bears_loss
        text = escape(token)
        # A mark around a line break alone is not visible.
        if bears_loss:
            text = text.replace("\n", "<i>↵</i>\n")
        pieces.append(f"<i>{text}</i>" if is_special else text)
    pieces.append("</mark>" if learned else "")
    if len(row.tokens) > MAX_SHOWN_TOKENS:
        num_more = len(row.tokens) - MAX_SHOWN_TOKENS + row.num_left_out
        pieces.append(f"<i> … {num_more:,} more tokens</i>")
    return "".join(pieces)
