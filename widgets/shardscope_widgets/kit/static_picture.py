"""A view as plain HTML: its words, its charts as SVG and its tables, for readers who have no kernel.

GitHub, nbviewer, nbconvert and mail show it: no script, no stylesheet of ours, nothing fetched. Looks are
inline, colours are the page's own or readable on light and dark.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser

import ipywidgets as widgets

from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.kit.chart_svg import DEFAULT_HEIGHT
from shardscope_widgets.kit.clickable import Clickable
from shardscope_widgets.run.log_pane import LogPane

WORDS = (widgets.HTML, Clickable, LogPane)
"""Widgets whose value is HTML."""
LEFT_OUT = {"ss-side", "ss-words", "ss-strip", "ss-repairs"}
"""Classes of boxes of questions, which the sentence above the answers sums up, of a button's progress, of
notices about what was just done, and of changes that only a living view can make."""
LOG_LINES = 40
GREY = "#767e87"
"""Text of images: 4.1 to 1 on white, 4.6 to 1 on JupyterLab's dark."""
FRAME = "font:13px/1.45 system-ui,sans-serif;max-width:760px"

TAG_STYLES = {
    "table": "border-collapse:collapse;margin:8px 0;font-size:13px",
    "th": "text-align:left;font-weight:600;padding:2px 14px 2px 0",
    "td": "text-align:left;padding:2px 14px 2px 0",
    "h2": "font-size:13px;font-weight:600;margin:14px 0 4px",
}
CLASS_STYLES = {
    "ss-verdict": "font-size:15px;font-weight:600",
    "ss-fits": "color:#2da44e",
    "ss-tight": "color:#bf8700",
    "ss-lacks": "color:#e5534b",
    "ss-error": "color:#e5534b",
    "ss-hint": "opacity:.75",
    "ss-swatch": "display:inline-block;width:12px;height:12px",
    "ss-log": "white-space:pre-wrap;font-family:monospace",
}
DROPPED = {"input", "select", "textarea", "option", "script", "style", "datalist", "template"}
KEPT_ATTRIBUTES = {"colspan", "rowspan", "title", "scope"}
VOID = {"br", "hr", "img", "wbr"}


def draw_picture(view: widgets.Widget) -> str:
    """Return what is in sight of ``view`` as HTML that stands alone."""
    parts = "".join(f"<div style='margin:6px 0'>{part}</div>" for part in _parts(view) if part)
    return f"<div style='{FRAME}'>{parts}</div>"


def words_and_charts(widget: widgets.Widget) -> Iterator[widgets.Widget]:
    """Yield the widgets in sight that a picture shows, from the top to the bottom."""
    layout = getattr(widget, "layout", None)  # A chart's is plotly's.
    if isinstance(widget, Chart):
        yield widget
    elif (
        not isinstance(widget, (widgets.Box, *WORDS))
        or layout.display == "none"
        or LEFT_OUT & set(widget._dom_classes)
    ):
        return
    elif not isinstance(widget, widgets.Box):
        yield widget
    else:
        for child in widget.children:
            yield from words_and_charts(child)


def _parts(view: widgets.Widget) -> Iterator[str]:
    for widget in words_and_charts(view):
        if isinstance(widget, Chart):
            try:
                svg = widget.to_svg()
            except Exception:  # A view is shown whatever its chart is made of; its words and table are there.
                svg = ""
            yield _chart(svg, widget.layout.height) if svg else ""
        elif isinstance(widget, LogPane):
            yield _end_of_log(widget.value)
        else:
            words = _Rewriter(widget.value).written
            if re.fullmatch(r"<h2[^>]*>[^<]*</h2>", words):
                continue  # Of buttons, which are left out.
            classes = " ".join(name for name in widget._dom_classes if name in CLASS_STYLES)
            yield f"<div style='{_style('div', classes)}'>{words}</div>" if words and classes else words


def _chart(svg: str, height: int | None) -> str:
    """Return the chart twice: as an element, and below it, cut off, as an image.

    A notebook of someone else is not trusted: JupyterLab takes ``<svg>`` out of it and leaves its words
    behind. Those have no size then, and the image comes into sight. An image cannot take the page's colour:
    its text is grey, which is readable on light and dark.
    """
    alone = svg.replace("<svg ", f"<svg xmlns='http://www.w3.org/2000/svg' color='{GREY}' ", 1)
    alone = re.sub(r" opacity='0\.7\d*'", "", alone)  # Grey is soft enough.
    packed = base64.b64encode(alone.encode()).decode()
    return (
        f"<div style='height:{height or DEFAULT_HEIGHT}px;overflow:hidden;font-size:0'>{svg}"
        f"<img alt='chart' src='data:image/svg+xml;base64,{packed}'></div>"
    )


def _end_of_log(html: str) -> str:
    lines = re.sub(r"<[^>]*>", "", html).strip("\n").split("\n")[-LOG_LINES:]
    text = "\n".join(lines)
    return f"<pre style='white-space:pre-wrap;font-size:12px'>{text}</pre>" if text else ""


def _style(tag: str, classes: str, own: str = "") -> str:
    styles = [TAG_STYLES.get(tag, ""), *(CLASS_STYLES.get(name, "") for name in classes.split()), own]
    return ";".join(filter(None, styles))


class _Rewriter(HTMLParser):
    """Writes a view's HTML again, with inline looks and without what can only be pressed.

    A legend, whose rows open in a living view, becomes a table.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self._out: list[str] = []
        self._open: list[tuple[str, str]] = []
        """The elements that are open, with what closes each."""
        self._in_legend = False
        self._silent = 0
        """How many open elements are left out with all that is in them."""
        self.feed(html)
        self.close()
        self._out += [end for _, end in reversed(self._open)]

    @property
    def written(self) -> str:
        """The HTML."""
        return "".join(self._out).strip()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag in VOID or tag == "input":
            if not self._silent and tag == "br":
                self._out.append("<br>")
            return
        begin, end = self._element(tag, given)
        # None: left out with its content. Elements in what is left out are counted only to find its end.
        if begin is None or self._silent:
            self._silent += 1
            self._open.append((tag, "\0"))
            return
        # Side by side in our stylesheet; here they would be one word.
        if tag == "span" and self._out and self._out[-1] == "</span>":
            self._out.append(" ")
        self._out.append(begin)
        self._open.append((tag, end))

    def _element(self, tag: str, given: dict[str, str]) -> tuple[str | None, str]:
        classes = given.get("class", "")
        parents = [name for name, _ in self._open]
        names = set(classes.split())
        # Rows that a press opens in a living view say how a number comes about; closed, they are left out.
        is_closed = tag == "tr" and "hidden" in given
        if (
            tag in DROPPED
            or is_closed
            or "ss-off-screen" in names
            or ("ss-hint" in names and "h2" in parents)
        ):
            return None, ""
        if tag == "button":
            # The words of a row's or column's button are its name; others are only there to be pressed.
            return ("", "") if {"td", "th"} & set(parents) else (None, "")
        in_rows = self._in_legend
        if tag == "div" and "ss-legend" in classes.split():
            self._in_legend = True
            return f"<table style='{TAG_STYLES['table']}'>", "</table>"
        if in_rows and tag == "details":
            return "", ""
        if in_rows and (tag == "summary" or "ss-titles" in classes.split()):
            return "<tr>", "</tr>"
        if in_rows and tag == "p":
            return None, ""  # A row's formula: for those who can open it.
        if in_rows and tag in ("i", "em", "span") and parents[-1:] in (["summary"], ["div"]):
            own = given.get("style", "")
            if tag == "i":
                box = f"display:inline-block;width:12px;height:12px;{own}"
                return f"<td style='padding:2px 8px 2px 0'><span style='{escape(box)}'>", "</span></td>"
            side = "right" if tag == "em" else "left"
            return f"<td style='padding:2px 14px 2px 0;text-align:{side};font-style:normal'>", "</td>"
        style = _style(tag, classes, given.get("style", ""))
        kept = {name: value for name, value in given.items() if name in KEPT_ATTRIBUTES}
        if style:
            kept["style"] = style
        written = "".join(f' {name}="{escape(value)}"' for name, value in kept.items())
        return f"<{tag}{written}>", f"</{tag}>"

    def handle_endtag(self, tag: str) -> None:
        if tag not in [name for name, _ in self._open]:
            return
        while self._open:
            name, end = self._open.pop()
            if end == "\0":
                self._silent -= 1
            else:
                self._out.append(end)
            if end == "</table>" and name == "div":
                self._in_legend = False
            if name == tag:
                return

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self._out.append(escape(data, quote=False))
