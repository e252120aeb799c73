"""A view as a page of its own, which works from disk without a kernel or network."""

from __future__ import annotations

import base64
import json
import os
from html import escape
from pathlib import Path

import ipywidgets as widgets
from plotly.utils import PlotlyJSONEncoder

from shardscope_widgets.kit.chart import Chart, get_packed_plotly
from shardscope_widgets.kit.clickable import Clickable
from shardscope_widgets.kit.front_end import front_end_text
from shardscope_widgets.kit.saved.static_picture import find_texts_and_charts, render_end_of_log, rewrite_html
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.run.log_pane import LogPane

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ margin: 16px; background: var(--jp-layout-color0, #fff); }}
main.ss-root {{ max-width: 1100px; height: auto; max-height: none; border: 0; resize: none; }}
@media screen and (prefers-color-scheme: dark) {{
  :root {{
    --jp-ui-font-color1: #e8ebee; --jp-ui-font-color2: #a3adb8; --jp-border-color2: #343c44;
    --jp-layout-color0: #111518; --jp-layout-color1: #1a2026;
  }}
}}
@media print {{ main .ss-steps {{ display: none; }} }}
{css}
</style></head>
<body><main class="{classes}">{body}</main>
<script type="application/octet-stream" id="plotly">{plotly}</script>
<script type="module">
{script}
</script></body></html>
"""


def write_page(view: widgets.Box, path: str | os.PathLike[str], title: str) -> Path:
    """Write the visible part of ``view`` as a page that needs no kernel and no network; return its path.

    Charts can be hovered over and walked through; what only a kernel can do is left out.
    """
    sheets = [child for child in view.children if isinstance(child, Sheet)]
    parts = [_render_part(part) for part in find_texts_and_charts(view)]
    scripts = ("keys.js", "chart.js", "steps.js", "saved_page.js")
    target = Path(path)
    target.write_text(
        PAGE.format(
            title=escape(title),
            css="\n".join(sheet._css for sheet in sheets),
            classes=_join(view),
            body="\n".join(parts),
            plotly=base64.b64encode(get_packed_plotly()).decode(),
            script=front_end_text("kit/front_end", *scripts),
        ),
        encoding="utf-8",
    )
    return target


def _join(widget: widgets.DOMWidget) -> str:
    return escape(" ".join([*widget._dom_classes, "widget-html-content"]), quote=True)


def _render_part(part: Chart | widgets.HTML | Clickable | LogPane) -> str:
    if isinstance(part, Chart):
        return _render_chart(part)
    if isinstance(part, LogPane):
        return render_end_of_log(part.value)
    # Rows and buttons that only a kernel follows become a plain table.
    html = rewrite_html(part.value) if isinstance(part, Clickable) else part.value
    return f"<div class='{_join(part)}'>{html}</div>" if html else ""


def _render_chart(chart: Chart) -> str:
    """Return a chart's place with its state; its picture is shown without scripts."""
    state = {
        "_figure": {"data": chart._data, "layout": chart._layout_obj._props},
        "label": chart.label,
        "_config": chart._config,
        "_source": "page",
        "clickable": False,
    }
    if hasattr(chart, "_frames"):
        state |= {"_frames": chart._frames, "step": chart.step}
    # In a script element only "</" would end the JSON.
    text = json.dumps(state, cls=PlotlyJSONEncoder).replace("</", "<\\/")
    return (
        f"<div data-chart><script type='application/json'>{text}</script>"
        f"<noscript>{chart.to_svg()}</noscript></div>"
    )
