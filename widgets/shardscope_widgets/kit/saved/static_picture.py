"""Static HTML of a view, for readers without a kernel: its text, its charts as SVG, and its tables.

GitHub, nbviewer, nbconvert and mail clients show it: no scripts, no stylesheet, nothing loaded. Styles are
inline; colours are inherited from the page or readable on light and dark backgrounds.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser

import ipywidgets as widgets

from shardscope.core.html_table import SCROLL_BOX
from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.kit.clickable import Clickable
from shardscope_widgets.kit.saved.chart_svg import DEFAULT_HEIGHT, WIDTH
from shardscope_widgets.run.log_pane import LogPane

TEXT_WIDGETS = (widgets.HTML, Clickable, LogPane)
"""Widgets whose value is HTML."""
LEFT_OUT = {
    *("ss-off", "ss-off-screen", "ss-side", "ss-finetune-settings", "ss-words", "ss-strip", "ss-repairs"),
    "ss-guide",
}
"""Classes of boxes that are left out: hidden ones, inputs (summarized by the headline) with their reasons,
progress, notices, and changes and steps that only a live view can make.
"""
LOG_LINES = 40
GREY = "#767e87"
"""Text colour of images: contrast 4.1:1 on white, 4.6:1 on JupyterLab's dark background."""
FRAME = "font:13px/1.45 system-ui,sans-serif;max-width:760px"

SWATCH = (
    "display:inline-block;width:12px;height:12px;margin-right:6px;vertical-align:-1px;"
    # Browsers leave backgrounds out when they print.
    "-webkit-print-color-adjust:exact;print-color-adjust:exact"
)
LINES = "#ffffffbf 0 1.5px,#0000 1.5px 5px"

TAG_STYLES = {
    "table": "border-collapse:collapse;margin:8px 0;font-size:13px",
    "th": "font-weight:600;padding:2px 14px 2px 0",
    "td": "padding:2px 14px 2px 0",
    # Browsers' own yellow would be glaring on a dark page.
    "mark": "background:rgba(58,134,255,.2);color:inherit;border-bottom:2px solid #3a86ff",
    "h2": "font-size:13px;font-weight:600;margin:14px 0 4px",
}
CLASS_STYLES = {
    "ss-verdict": "font-size:15px;font-weight:600",
    "ss-sign": "font-style:normal;margin-right:4px",
    "ss-fits": "color:#2da44e",
    "ss-tight": "color:#bf8700",
    "ss-lacks": "color:#e5534b",
    "ss-error": "color:#e5534b",
    "ss-hint": "opacity:.75",
    "ss-swatch": SWATCH,
    # The same colours in a table's rows, which are the only legend of a saved chart.
    "ss-mark": SWATCH,
    "ss-hatched": "background-image:repeating-linear-gradient(135deg,#0000 0 3px,#00000059 3px 4px)",
    "ss-lines": f"background-image:repeating-linear-gradient(135deg,{LINES})",
    "ss-back-lines": f"background-image:repeating-linear-gradient(45deg,{LINES})",
    "ss-cross": f"background-image:repeating-linear-gradient(135deg,{LINES}),"
    f"repeating-linear-gradient(45deg,{LINES})",
    "ss-dots": "background-image:radial-gradient(#ffffffbf 1px,#0000 1.5px);background-size:4px 4px",
    "ss-entry": "margin-right:14px;white-space:nowrap",
    "ss-line-swatch": "width:20px;height:4px;margin-right:6px;vertical-align:middle",
    "ss-log": "white-space:pre-wrap;font-family:monospace",
}
CELLS = ("th", "td")
DROPPED = {"input", "select", "textarea", "option", "script", "style", "datalist", "template"}
KEPT_ATTRIBUTES = {"colspan", "rowspan", "title", "scope"}
PRINTED_FOLDS = {"why"}
"""Keys of the folds that are open in a picture, since on paper nobody can open them: reasons of advice."""
# Without them, a line of a legend would be an empty box of 300 x 150 pixels.
LINE_ATTRIBUTES = {"viewbox", "d", "stroke", "stroke-width", "stroke-dasharray"}
VOID = {"br", "hr", "img", "wbr"}


def draw_picture(view: widgets.Widget) -> str:
    """Return the visible part of ``view`` as self-contained HTML."""
    parts = "".join(f"<div style='margin:6px 0'>{part}</div>" for part in _render_parts(view) if part)
    return f"<div style='{FRAME}'>{parts}</div>"


def find_texts_and_charts(
    widget: widgets.Widget,
) -> Iterator[Chart | widgets.HTML | Clickable | LogPane]:
    """Yield the visible widgets that the picture includes, from top to bottom."""
    # A chart's layout is plotly's: it cannot be hidden.
    if isinstance(widget, Chart):
        yield widget
    elif isinstance(widget, TEXT_WIDGETS):
        if _is_visible(widget):
            yield widget
    elif isinstance(widget, widgets.Box) and _is_visible(widget):
        for child in widget.children:
            yield from find_texts_and_charts(child)


def _is_visible(widget: widgets.DOMWidget) -> bool:
    return widget.layout.display != "none" and not LEFT_OUT & set(widget._dom_classes)


def _render_parts(view: widgets.Widget) -> Iterator[str]:
    for widget in find_texts_and_charts(view):
        if isinstance(widget, Chart):
            try:
                svg = widget.to_svg()
            except Exception:  # Keep the view's text and table whatever its chart contains.
                svg = ""
            yield _render_chart(svg, widget.layout.height, widget.label) if svg else ""
            if widget.words:
                yield f"<p>{escape(widget.words)}</p>"
        elif isinstance(widget, LogPane):
            yield render_end_of_log(widget.value)
        else:
            html = rewrite_html(widget.value)
            if re.fullmatch(r"<h2[^>]*>[^<]*</h2>", html):
                continue  # Text that belongs to buttons, which are left out.
            classes = " ".join(name for name in widget._dom_classes if name in CLASS_STYLES)
            yield f"<div style='{_join_styles('div', classes)}'>{html}</div>" if html and classes else html


def _render_chart(svg: str, height: int | None, label: str) -> str:
    """Return the chart twice: as an ``<svg>`` element and, below it and clipped, as an image.

    JupyterLab does not trust notebooks of others: it removes ``<svg>`` and leaves its text. That text then
    has no size, and the image moves into view. An image cannot inherit the page's colour, so its text is
    grey, which is readable on light and dark backgrounds.
    """
    alone = svg.replace("<svg ", f"<svg xmlns='http://www.w3.org/2000/svg' color='{GREY}' ", 1)
    alone = re.sub(r" opacity='0\.7\d*'", "", alone)  # Grey is faint enough.
    packed = base64.b64encode(alone.encode()).decode()
    # On paper and in narrow windows the SVG shrinks: a fixed height would show the top of the image below it.
    shape = f"max-width:{WIDTH}px;aspect-ratio:{WIDTH}/{height or DEFAULT_HEIGHT}"
    return (
        f"<div style='{shape};overflow:hidden;font-size:0'>{svg}"
        # GitHub's viewer removes styles too: the words that are left of the SVG have a line of their own.
        f"<br><img alt='{escape(label, quote=True)}' src='data:image/svg+xml;base64,{packed}'></div>"
    )


def rewrite_html(html: str) -> str:
    """Return a view's HTML with inline styles, and without what only a live view can do."""
    return _Rewriter(html).written


def render_end_of_log(html: str) -> str:
    """Return the last lines of a log's HTML as plain text."""
    # Without colours, which are classes of a stylesheet that a saved notebook lacks.
    lines = re.sub(r"<[^>]*>", "", html).strip("\n").split("\n")[-LOG_LINES:]
    text = "\n".join(lines)
    return f"<pre style='white-space:pre-wrap;font-size:12px'>{text}</pre>" if text else ""


def _join_styles(tag: str, classes: str, inline: str = "") -> str:
    styles = [TAG_STYLES.get(tag, ""), *(CLASS_STYLES.get(name, "") for name in classes.split()), inline]
    return ";".join(filter(None, styles))


class _Rewriter(HTMLParser):
    """A rewriter of a view's HTML: it makes styles inline and removes elements that only react to clicks.

    An element with ``data-saved``, such as "Computing …", has that text instead: no kernel may be left that
    finishes the work.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self._out: list[str] = []
        self._open: list[tuple[str, str]] = []
        """The open elements, with the closing tag of each."""
        self._num_cells = 0
        """Number of cells of the open row."""
        self._silent = 0
        """Number of open elements that are left out with their content."""
        self.feed(html)
        self.close()
        self._out += [end for _, end in reversed(self._open)]

    @property
    def written(self) -> str:
        """The resulting HTML."""
        return "".join(self._out).strip()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        # These have no end tag, so they must not wait on the stack for one.
        if tag in VOID or tag == "input":
            if not self._silent and tag == "br":
                self._out.append("<br>")
            return
        begin, end = self._rewrite_element(tag, attributes)
        saved = attributes.get("data-saved")
        if saved and begin and not self._silent:
            self._out += [begin, escape(saved, quote=False), end]
            begin = None
        # None: left out with its content. Elements inside it are counted only to find its end.
        if begin is None or self._silent:
            self._silent += 1
            self._open.append((tag, "\0"))
            return
        # Our stylesheet puts these side by side; without it they would run together.
        if tag == "span" and self._out and self._out[-1] == "</span>":
            self._out.append(" ")
        self._out.append(begin)
        self._open.append((tag, end))

    def _rewrite_element(self, tag: str, attributes: dict[str, str]) -> tuple[str | None, str]:
        """Return what is written for the begin and the end of an element; None leaves it out."""
        names = set(attributes.get("class", "").split())
        parents = [name for name, _ in self._open]
        if _is_left_out(tag, attributes, names, parents):
            return None, ""
        if tag == "button":
            # The text of a row's or column's button is its name; other buttons are left out.
            return ("", "") if {"td", "th"} & set(parents) else (None, "")
        return self._restyle_element(tag, attributes, names)

    def _restyle_element(self, tag: str, attributes: dict[str, str], names: set[str]) -> tuple[str, str]:
        """Return the element with its style and the attributes that need no style sheet."""
        inline = attributes.get("style", "")
        if tag == "tr":
            self._num_cells = 0
        if tag in CELLS:
            # As in a live view: numbers line up on the right, below their heads.
            self._num_cells += 1
            side = "left" if self._num_cells == 1 or "ss-text" in names else "right"
            inline = f"text-align:{side};{inline}"
        style = _join_styles(tag, attributes.get("class", ""), inline)
        kept_names = LINE_ATTRIBUTES if tag in ("svg", "path") else KEPT_ATTRIBUTES
        kept_attributes = {name: value for name, value in attributes.items() if name in kept_names}
        if style:
            kept_attributes["style"] = style
        if tag == "details" and attributes.get("data-key") in PRINTED_FOLDS:
            kept_attributes["open"] = ""
        written = "".join(f' {name}="{escape(value)}"' for name, value in kept_attributes.items())
        if tag == "table":
            return f"{SCROLL_BOX}<{tag}{written}>", f"</{tag}></div>"
        return f"<{tag}{written}>", f"</{tag}>"

    def handle_endtag(self, tag: str) -> None:
        if tag not in [name for name, _ in self._open]:
            return
        # An end tag closes also what the HTML left open inside of its element.
        while self._open:
            name, end = self._open.pop()
            if end == "\0":
                self._silent -= 1
            else:
                self._out.append(end)
            if name == tag:
                return

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self._out.append(escape(data, quote=False))


def _is_left_out(tag: str, attributes: dict[str, str], names: set[str], parents: list[str]) -> bool:
    """Return whether an element has nothing for a reader without a kernel."""
    return (
        tag in DROPPED
        # Collapsed rows explain a number.
        or (tag == "tr" and "hidden" in attributes)
        or ("ss-hint" in names and "h2" in parents)
        # ss-lengths: a chart of boxes that only the style sheet draws; its sentences have the lengths.
        or bool(names & {"ss-off-screen", "ss-empty", "ss-lengths"})
    )
