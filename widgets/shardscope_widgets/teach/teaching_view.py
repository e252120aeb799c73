"""The base class of figures that teach: a plan, a heading, and a page of its own that works from disk."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable
from html import escape
from pathlib import Path

import ipywidgets as widgets
from plotly.utils import PlotlyJSONEncoder

import shardscope as ss
from shardscope_widgets.kit.chart import Chart, get_packed_plotly
from shardscope_widgets.kit.display_names import describe_plan, format_name
from shardscope_widgets.kit.front_end import front_end_text
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.static_picture import find_texts_and_charts
from shardscope_widgets.kit.view import View

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ margin: 16px; background: var(--jp-layout-color0, #fff); }}
main {{ max-width: 1100px; }}
@media (prefers-color-scheme: dark) {{
  :root {{
    --jp-ui-font-color1: #e8ebee; --jp-ui-font-color2: #a3adb8; --jp-border-color2: #343c44;
    --jp-layout-color0: #111518; --jp-layout-color1: #1a2026;
  }}
}}
@media print {{ .ss-steps {{ display: none; }} }}
{css}
</style></head>
<body><main class="{classes}">{body}</main>
<script type="application/octet-stream" id="plotly">{plotly}</script>
<script type="module">
{script}
</script></body></html>
"""


class TeachingView(View):
    """A figure of a plan that is drawn in place when :meth:`show` receives another plan."""

    title = ""

    def __init__(self, *parts: widgets.Widget) -> None:
        self.plan: ss.Plan | None = None
        super().__init__([Sheet("memory", "teach"), *parts])
        for name in ("ss-root", "ss-view", "ss-teach"):
            self.add_class(name)

    def show(self, plan: ss.Plan) -> None:
        """Draw another plan."""
        raise NotImplementedError

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the figure as one page that works from disk, without a kernel or network; return its path."""
        name = format_name(self.plan.architecture.name) if self.plan else ""
        return write_page(self, path, f"{self.title}: {name}" if name else self.title)


def write_heading(plan: ss.Plan, sentences: Iterable[str]) -> str:
    """Return the plan in a sentence, and what the figure shows of it."""
    return f"<p>{describe_plan(plan)}</p>" + "".join(f"<p>{escape(one)}</p>" for one in sentences)


def render_key(entries: Iterable[tuple[str, str, str]]) -> str:
    """Return a legend of (CSS background, name, note)."""
    rows = "".join(
        f"<span title='{escape(note, quote=True)}'><i class='ss-swatch' style='background:{background}'></i>"
        f"{escape(name)}</span>"
        for background, name, note in entries
    )
    return f"<div class='ss-key'>{rows}</div>"


def write_page(view: widgets.Box, path: str | os.PathLike[str], title: str) -> Path:
    """Write the visible part of ``view`` as a page that needs no kernel and no network; return its path.

    Charts can be hovered over and walked through; what only a kernel can do is left out.
    """
    sheets = [child for child in view.children if isinstance(child, Sheet)]
    parts = [
        _render_chart(part) if isinstance(part, Chart) else f"<div class='{_join(part)}'>{part.value}</div>"
        for part in find_texts_and_charts(view)
    ]
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


def _render_chart(chart: Chart) -> str:
    """Return a chart's place with its state; its picture is shown without scripts."""
    state = {
        "_figure": {"data": chart._data, "layout": chart._layout_obj._props},
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
