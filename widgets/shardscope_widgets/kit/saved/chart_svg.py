"""SVG rendering of plotly figures in Python: the bars, lines, areas and markers that the views use.

Saved notebooks contain it, for readers without a kernel: text inherits the colour of its page, and the SVG
contains no scripts and loads nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

Props = Mapping[str, object]
"""Properties of a trace, an axis or the layout in the form that plotly sends to its front end."""

WIDTH = 760
DEFAULT_HEIGHT = 450
DEFAULT_MARGIN: Mapping[str, int] = {"l": 80, "r": 80, "t": 100, "b": 80}
MOST_POINTS = 300
"""Maximum points of a line or scatter trace: more would be indistinguishable and enlarge the notebook."""
DASHES = {"dash": "6 4", "dot": "2 3", "dashdot": "6 3 2 3", "longdash": "10 5"}
TICKS = 6
DEFAULT_BAR_GAP = 0.2
PATTERN_PIXELS = 6
"""Distance between the lines of a pattern, along the bar."""
TITLE_PIXELS = 46
"""Distance of a vertical axis's title from the axis: room for the labels of its ticks."""
INK = "currentColor"
BAR_TEXT = "#10151a"
"""Text in bars, whose colours are light in every theme."""


@dataclass
class Axis:
    """The mapping of one axis from values to pixels."""

    props: Props
    start: float
    end: float
    """Pixels of the start and the end of the range."""
    categories: list[str] = field(default_factory=list)
    low: float = 0.0
    high: float = 1.0

    @property
    def is_visible(self) -> bool:
        """Return whether the axis has ticks and a title."""
        return self.props.get("visible", True) is not False

    @property
    def is_collapsed(self) -> bool:
        """Return whether the axis has no extent, so that its traces and annotations are left out."""
        return abs(self.end - self.start) < 2

    def to_pixel(self, value: object) -> float:
        """Return the pixel of ``value``, which is a number or a category name; NaN for anything else."""
        if isinstance(value, str) and value in self.categories:
            value = self.categories.index(value)
        share = (_read_number(value, math.nan) - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.end - self.start)

    def share_to_pixel(self, share: float) -> float:
        """Return the pixel at ``share`` of the axis."""
        return self.start + share * (self.end - self.start)

    def list_ticks(self) -> Iterator[tuple[float, str]]:
        """Yield the pixel and the label of each tick."""
        if self.props.get("showticklabels") is False:
            return
        if self.props.get("tickvals") is not None:
            values = _to_list(self.props["tickvals"])
            labels = _to_list(self.props.get("ticktext")) or values
            yield from (
                (self.to_pixel(value), str(text)) for value, text in zip(values, labels, strict=False)
            )
            return
        if self.categories:
            yield from ((self.to_pixel(name), name) for name in self.categories)
            return
        most = int(_read_number(self.props.get("nticks"), TICKS)) or TICKS
        ticks = _choose_round_ticks(self.low, self.high, min(TICKS, most))
        for number, tick in enumerate(ticks):
            is_last = number == len(ticks) - 1
            has_suffix = self.props.get("showticksuffix") != "last" or is_last
            suffix = _read_text(self.props.get("ticksuffix")) if has_suffix else ""
            yield self.to_pixel(tick), _format_tick(tick) + suffix


def draw_svg(traces: Sequence[Props], layout: Props, label: str = "Chart") -> str:
    """Return a plotly figure as one ``<svg>`` element; ``label`` is its text alternative."""
    return _Drawing(traces, layout).draw_all(label)


class _Drawing:
    """One SVG drawing: its size, its axes and its elements."""

    def __init__(self, traces: Sequence[Props], layout: Props) -> None:
        self.traces = [trace for trace in traces if trace.get("visible", True) is True]
        self.layout = layout
        self.height = int(_read_number(layout.get("height"), 0)) or DEFAULT_HEIGHT
        margins = _read_props(layout.get("margin"))
        left, right, top, bottom = (
            _read_number(margins.get(side), default) for side, default in DEFAULT_MARGIN.items()
        )
        self.left, self.right = left, WIDTH - right
        self.top, self.bottom = top, self.height - bottom
        self.axes: dict[str, Axis] = {}
        for trace in self.traces:
            for letter in "xy":
                self.find_axis(_name_axis(trace, letter))

    def find_axis(self, name: str) -> Axis:
        """Return the axis ``x``, ``y2`` or another, creating it on first use."""
        if name not in self.axes:
            self.axes[name] = self._make_axis(name)
        return self.axes[name]

    def _make_axis(self, name: str) -> Axis:
        letter = name[0]
        props = _read_props(self.layout.get(f"{letter}axis{name[1:]}"))
        low, high = _read_pair(props.get("domain")) or (0.0, 1.0)
        # SVG's y points down, so a vertical axis starts at the bottom.
        begin, end = (self.left, self.right) if letter == "x" else (self.bottom, self.top)
        axis = Axis(props, begin + low * (end - begin), begin + high * (end - begin))
        axis_traces = [trace for trace in self.traces if _name_axis(trace, letter) == name]
        values = [value for trace in axis_traces for value in _list_values(trace, letter)]
        # As in plotly, text makes an axis categorical; categoryarray only sets the order.
        names = [value for value in values if isinstance(value, str)]
        if names or props.get("type") == "category":
            wanted = [str(name_) for name_ in _to_list(props.get("categoryarray"))]
            axis.categories = list(dict.fromkeys([*wanted, *names]))
        axis.low, axis.high = self._find_range(props, axis, axis_traces, values)
        return axis

    def _find_range(
        self, props: Props, axis: Axis, axis_traces: Sequence[Props], values: Sequence[object]
    ) -> tuple[float, float]:
        explicit = _read_pair(props.get("range"))
        if explicit is not None:
            return explicit
        if axis.categories:
            # As in plotly, categories are at whole numbers with half a category of room at both ends.
            return -0.5, len(axis.categories) - 0.5
        numbers = [number for value in values if math.isfinite(number := _read_number(value, math.nan))]
        if not numbers:
            return 0.0, 1.0
        low, high = min(numbers), max(numbers)
        if props.get("rangemode") == "tozero" or any(trace.get("type") == "bar" for trace in axis_traces):
            low, high = min(low, 0.0), max(high, 0.0)
        # About the room that plotly leaves around the data; bars start at zero without any.
        room = 0.05 * ((high - low) or abs(high) or 1.0)
        return (low if low == 0 else low - room), high + room

    def draw_all(self, label: str) -> str:
        """Return the whole SVG, from the bottom layer to the top layer."""
        # plotly's order: grid lines are below the data, shapes and annotations above.
        parts = [
            *self._draw_axes(),
            *self._draw_bars(),
            *self._draw_scatters(),
            *self._draw_shapes(),
            *self._draw_annotations(),
        ]
        return (
            f"<svg viewBox='0 0 {WIDTH} {self.height}' width='{WIDTH}' height='{self.height}' "
            f"role='img' aria-label='{escape(label, quote=True)}' "
            "style='max-width:100%;height:auto;display:block' "
            # Viewers that remove SVG, such as GitHub's, leave its words: a space keeps them apart.
            f"fill='currentColor' font-family='system-ui,sans-serif' font-size='12'>{' '.join(parts)}</svg>"
        )

    # ------------------------------------------------------------------------------------------- axes

    def _draw_axes(self) -> Iterator[str]:
        for name, axis in self.axes.items():
            if not axis.is_visible or axis.is_collapsed:
                continue
            crossing = ("y" if name[0] == "x" else "x") + name[1:]
            other = self.find_axis(_read_text(axis.props.get("anchor")) or crossing)
            has_grid = axis.props.get("showgrid") is not False and not axis.categories
            edges = sorted((other.start, other.end))
            for pixel, label in axis.list_ticks():
                if not min(axis.start, axis.end) - 1 <= pixel <= max(axis.start, axis.end) + 1:
                    continue
                if name[0] == "x":
                    if has_grid:
                        yield _draw_line(pixel, edges[0], pixel, edges[1], 1, opacity=0.15)
                    yield _draw_text(pixel, edges[1] + 16, label, "middle", opacity=0.75)
                else:
                    if has_grid:
                        yield _draw_line(edges[0], pixel, edges[1], pixel, 1, opacity=0.15)
                    yield _draw_text(edges[0] - 8, pixel + 4, label, "end", opacity=0.75)
            title = axis.props.get("title")
            title = _read_text(title) or _read_text(_read_props(title).get("text"))
            if title and name[0] == "x":
                yield _draw_text((axis.start + axis.end) / 2, edges[1] + 32, title, "middle", opacity=0.75)
            elif title:
                # Beside the labels of the ticks, read from below.
                across, down = max(edges[0] - TITLE_PIXELS, 10), (axis.start + axis.end) / 2
                label = _draw_text(0, 0, title, "middle", opacity=0.75)
                yield f"<g transform='translate({across:.1f} {down:.1f}) rotate(-90)'>{label}</g>"

    # ------------------------------------------------------------------------------------------ traces

    def _draw_bars(self) -> Iterator[str]:
        ends: dict[tuple[str, str, object], float] = {}
        gap = _read_number(self.layout.get("bargap"), 0) or DEFAULT_BAR_GAP
        for trace in self.traces:
            if trace.get("type") != "bar":
                continue
            is_horizontal = trace.get("orientation") == "h"
            length_letter, position_letter = ("x", "y") if is_horizontal else ("y", "x")
            names = (_name_axis(trace, length_letter), _name_axis(trace, position_letter))
            length_axis, position_axis = self.find_axis(names[0]), self.find_axis(names[1])
            if length_axis.is_collapsed or position_axis.is_collapsed:
                continue
            thick = (1 - gap) * abs(position_axis.to_pixel(1.0) - position_axis.to_pixel(0.0))
            marker, texts = _read_props(trace.get("marker")), trace.get("text")
            for number, (position, length) in enumerate(
                zip(_to_list(trace.get(position_letter)), _to_list(trace.get(length_letter)), strict=False)
            ):
                size = _read_number(length, 0)
                if not size or not math.isfinite(size):
                    continue
                # A stacked bar starts where the previous trace ended at this position.
                key = (*names, position)
                begin = ends.get(key, 0.0) if self.layout.get("barmode") == "stack" else 0.0
                begin = _pick_number(trace.get("base"), number, begin)
                ends[key] = begin + size
                middle, first, last = (
                    position_axis.to_pixel(position),
                    length_axis.to_pixel(begin),
                    length_axis.to_pixel(begin + size),
                )
                box = (
                    (min(first, last), middle - thick / 2, abs(last - first), thick)
                    if is_horizontal
                    else (middle - thick / 2, min(first, last), thick, abs(last - first))
                )
                yield _draw_rectangle(
                    box,
                    _pick_for_point(marker.get("color"), number, INK),
                    _pick_number(marker.get("opacity"), number, 1.0),
                    _read_text(trace.get("name")),
                )
                yield from _draw_pattern(box, _read_props(marker.get("pattern")), number)
                text = _read_text(_pick_for_point(texts, number, ""))
                # Of plotly's text in bars, what fits: horizontal bars only.
                if is_horizontal and text and abs(last - first) > 6 + 6 * len(text):
                    yield (
                        f"<text x='{(first + last) / 2:.1f}' y='{middle + 4:.1f}' text-anchor='middle' "
                        f"font-size='10' fill='{BAR_TEXT}'>{escape(text)}</text>"
                    )

    def _draw_scatters(self) -> Iterator[str]:
        heights: dict[tuple[str, str], list[float]] = {}
        for trace in self.traces:
            if trace.get("type", "scatter") != "scatter":
                continue
            x, y = self.find_axis(_name_axis(trace, "x")), self.find_axis(_name_axis(trace, "y"))
            if x.is_collapsed or y.is_collapsed:
                continue
            points = [
                (each_x, _read_number(each_y, math.nan))
                for each_x, each_y in zip(_to_list(trace.get("x")), _to_list(trace.get("y")), strict=False)
                if each_y is not None
            ]
            # Areas of a group are stacked in the order of the traces.
            group = _read_text(trace.get("stackgroup"))
            if group:
                key = (_name_axis(trace, "y"), group)
                below = heights.get(key, [0.0] * len(points))
                above = [(each_x, low + each_y) for (each_x, each_y), low in zip(points, below, strict=False)]
                heights[key] = [each_y for _, each_y in above]
                yield _draw_area(x, y, above, below, trace.get("fillcolor"), _read_text(trace.get("name")))
                continue
            yield from self._draw_line_and_markers(trace, x, y, _downsample(points))

    def _draw_line_and_markers(
        self, trace: Props, x: Axis, y: Axis, points: Sequence[tuple[object, float]]
    ) -> Iterator[str]:
        mode, line = _read_text(trace.get("mode")) or "lines", _read_props(trace.get("line"))
        pixels = [(x.to_pixel(each_x), y.to_pixel(each_y)) for each_x, each_y in points]
        if "lines" in mode and (line.get("width") is None or line["width"]):
            steps = "V" if line.get("shape") == "hv" else "L"
            # NaN lifts the pen: a gap in the data stays a gap in the line.
            path, is_down = [], False
            for across, down in pixels:
                if not (math.isfinite(across) and math.isfinite(down)):
                    is_down = False
                    continue
                move = f"H{across:.1f}V{down:.1f}" if steps == "V" else f"L{across:.1f} {down:.1f}"
                path.append(move if is_down else f"M{across:.1f} {down:.1f}")
                is_down = True
            dash = DASHES.get(_read_text(line.get("dash")), "")
            yield (
                f"<path d='{''.join(path)}' fill='none' stroke='{_escape_colour(line.get('color'))}' "
                f"stroke-width='{_read_number(line.get('width'), 2):g}' stroke-dasharray='{dash}'/>"
            )
        if "markers" in mode:
            yield from _draw_markers(_read_props(trace.get("marker")), pixels)

    # --------------------------------------------------------------------------- lines and text on top

    def _find_pixel(self, value: object, ref: str, letter: str) -> float:
        """Return the pixel of a shape's or annotation's coordinate, or NaN if its axis is not visible."""
        if ref == "paper":
            begin, end = (self.left, self.right) if letter == "x" else (self.bottom, self.top)
            return begin + _read_number(value, math.nan) * (end - begin)
        name, _, is_domain = ref.partition(" ")
        axis = self.find_axis(name)
        if not axis.is_visible:
            return math.nan
        return axis.share_to_pixel(_read_number(value, math.nan)) if is_domain else axis.to_pixel(value)

    def _draw_shapes(self) -> Iterator[str]:
        for shape in map(_read_props, _to_list(self.layout.get("shapes"))):
            ends = [
                self._find_pixel(
                    shape[f"{letter}{end}"], _read_text(shape.get(f"{letter}ref")) or letter, letter
                )
                for end in (0, 1)
                for letter in "xy"
            ]
            if shape.get("type") == "rect" and all(map(math.isfinite, ends)):
                x0, y0, x1, y1 = ends
                box = (min(x0, x1), min(y0, y1), abs(x1 - x0), abs(y1 - y0))
                yield _draw_rectangle(box, shape.get("fillcolor"), _read_number(shape.get("opacity"), 1), "")
            if shape.get("type") == "line" and all(map(math.isfinite, ends)):
                line = _read_props(shape.get("line"))
                dash = DASHES.get(_read_text(line.get("dash")), "")
                width, opacity = _read_number(line.get("width"), 1), _read_number(shape.get("opacity"), 1)
                x0, y0, x1, y1 = ends
                yield _draw_line(x0, y0, x1, y1, width, dash, opacity)

    def _draw_annotations(self) -> Iterator[str]:
        anchors = {"left": "start", "right": "end"}
        for note in map(_read_props, _to_list(self.layout.get("annotations"))):
            x = self._find_pixel(note.get("x", 0), _read_text(note.get("xref")) or "x", "x")
            y = self._find_pixel(note.get("y", 0), _read_text(note.get("yref")) or "y", "y")
            text = _read_text(note.get("text"))
            if not (math.isfinite(x) and math.isfinite(y)) or not text:
                continue
            # In SVG y is the baseline: a text below or around its anchor moves down by a part of its height.
            lower = {"bottom": -3.0, "top": 12.0}.get(_read_text(note.get("yanchor")), 4.0)
            yield _draw_text(
                x + _read_number(note.get("xshift"), 0),
                y - _read_number(note.get("yshift"), 0) + lower,
                text,
                anchors.get(_read_text(note.get("xanchor")), "middle"),
                size=_read_number(_read_props(note.get("font")).get("size"), 12),
                opacity=_read_number(note.get("opacity"), 1),
            )


def _draw_markers(marker: Props, points: Sequence[tuple[float, float]]) -> Iterator[str]:
    """Draw filled markers as zero-length lines with round caps, open ones as circles."""
    # One path for all markers of a style: a circle per point would enlarge the notebook.
    paths_by_style: dict[tuple[str, float, float], list[str]] = {}
    for number, (across, down) in enumerate(points):
        if not (math.isfinite(across) and math.isfinite(down)):
            continue
        colour = _escape_colour(_pick_for_point(marker.get("color"), number, INK))
        size = _pick_number(marker.get("size"), number, 6)
        opacity = _pick_number(marker.get("opacity"), number, 1)
        if str(_pick_for_point(marker.get("symbol"), number, "")).endswith("-open"):
            yield (
                f"<circle cx='{across:.1f}' cy='{down:.1f}' r='{size / 2:.1f}' fill='none' stroke='{colour}' "
                f"stroke-width='1.5' opacity='{opacity:g}'/>"
            )
        else:
            paths_by_style.setdefault((colour, size, opacity), []).append(f"M{across:.0f} {down:.0f}h0")
    for (colour, size, opacity), moves in paths_by_style.items():
        yield (
            f"<path d='{''.join(moves)}' stroke='{colour}' stroke-width='{size:g}' stroke-linecap='round' "
            f"opacity='{opacity:g}' fill='none'/>"
        )


def _list_values(trace: Props, letter: str) -> list[object]:
    """Return the values of a trace on one axis, without missing ones."""
    return [value for value in _to_list(trace.get(letter)) if value is not None]


def _to_list(values: object) -> list[object]:
    if isinstance(values, np.ndarray):
        return list(values.tolist())
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str) else []


def _read_props(value: object) -> Props:
    """Return ``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def _read_text(value: object) -> str:
    """Return ``value`` if it is text, else an empty one."""
    return value if isinstance(value, str) else ""


def _read_number(value: object, default: float) -> float:
    """Return ``value`` if it is a number, else ``default``."""
    return float(value) if isinstance(value, int | float | np.number) else default


def _read_pair(value: object) -> tuple[float, float] | None:
    """Return two numbers, such as a range; None if one of them is left to plotly."""
    values = _to_list(value)
    if len(values) != 2 or None in values:
        return None
    return _read_number(values[0], math.nan), _read_number(values[1], math.nan)


def _name_axis(trace: Props, letter: str) -> str:
    """Return the name of a trace's axis: ``x``, ``y2``."""
    return _read_text(trace.get(f"{letter}axis")) or letter


def _pick_number(values: object, number: int, default: float) -> float:
    """Return the numeric property of one point."""
    return _read_number(_pick_for_point(values, number, default), default)


def _pick_for_point(values: object, number: int, default: object) -> object:
    """Return the property of one point, given a single value for all points or a list."""
    if isinstance(values, list | tuple | np.ndarray):
        return values[number] if number < len(values) else default
    return default if values is None else values


def _downsample(points: Sequence[tuple[object, float]]) -> Sequence[tuple[object, float]]:
    if len(points) <= MOST_POINTS:
        return points
    return [points[round(index)] for index in np.linspace(0, len(points) - 1, MOST_POINTS)]


def _choose_round_ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most ``most`` round numbers from ``low`` to ``high``."""
    span = abs(high - low)
    if not (span and math.isfinite(span)):
        return []
    # Round the spacing up to 1, 2 or 5 times a power of ten, as plotly does.
    rough = span / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(min(low, high) / step - 1e-9)
    last = math.floor(max(low, high) / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _format_tick(value: float) -> str:
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):,.4g}{letter}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _escape_colour(value: object) -> str:
    return escape(value, quote=True) if isinstance(value, str) else INK


def _draw_rectangle(box: tuple[float, float, float, float], colour: object, opacity: float, name: str) -> str:
    x, y, width, height = box
    fill = _escape_colour(colour)
    return (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{fill}' "
        f"opacity='{opacity:g}'><title>{escape(name)}</title></rect>"
    )


def _draw_pattern(box: tuple[float, float, float, float], pattern: Props, number: int) -> Iterator[str]:
    """Draw the diagonal lines of plotly's patterns ``/``, ``\\`` and ``x`` in a bar; there are no dots."""
    left, top, width, height = box
    shape = _read_text(_pick_for_point(pattern.get("shape"), number, ""))
    slopes = {"/": (-1,), "\\": (1,), "x": (-1, 1)}.get(shape, ())
    path = []
    # Lines that are cut at the bar's edges, not a <pattern>: its id would have to be unique in the notebook.
    for slope in slopes:
        for offset in range(PATTERN_PIXELS // 2 - math.ceil(height), math.ceil(width), PATTERN_PIXELS):
            start, end = max(offset, 0.0), min(offset + height, width)
            if end > start:
                downs = (start - offset, end - offset)
                first, last = downs if slope > 0 else (height - downs[0], height - downs[1])
                path.append(f"M{left + start:.1f} {top + first:.1f}L{left + end:.1f} {top + last:.1f}")
    if path:
        colour = _escape_colour(_pick_for_point(pattern.get("fgcolor"), number, BAR_TEXT))
        yield f"<path d='{''.join(path)}' stroke='{colour}' stroke-width='1' opacity='0.6'/>"


def _draw_area(
    x: Axis, y: Axis, above: Iterable[tuple[object, float]], below: Sequence[float], colour: object, name: str
) -> str:
    top = [(x.to_pixel(across), y.to_pixel(height)) for across, height in above]
    under = [(place[0], y.to_pixel(height)) for place, height in zip(top, below, strict=False)]
    corners = " ".join(f"{across:.1f},{down:.1f}" for across, down in [*top, *reversed(under)])
    return (
        f"<polygon points='{corners}' fill='{_escape_colour(colour)}'><title>{escape(name)}</title></polygon>"
    )


def _draw_line(
    x0: float, y0: float, x1: float, y1: float, width: float, dash: str = "", opacity: float = 1
) -> str:
    return (
        f"<line x1='{x0:.1f}' y1='{y0:.1f}' x2='{x1:.1f}' y2='{y1:.1f}' stroke='{INK}' "
        f"stroke-width='{width:g}' stroke-dasharray='{dash}' opacity='{opacity:g}'/>"
    )


def _draw_text(x: float, y: float, text: str, anchor: str, *, size: float = 12, opacity: float = 1) -> str:
    """Return plotly's text as SVG; the only markup kept is bold."""
    # Bold survives the escaping as control characters; a line break has no counterpart in SVG text.
    plain = escape(re.sub(r"<br\s*/?>", " ", text).replace("<b>", "\0").replace("</b>", "\1"), quote=False)
    plain = re.sub(r"&lt;/?\w+[^&]*&gt;", "", plain).replace("&amp;lt;", "&lt;").replace("&amp;gt;", "&gt;")
    # A bold tag without its end would make the whole SVG invalid.
    is_balanced = plain.count("\0") == plain.count("\1")
    begin, end = ("<tspan font-weight='600'>", "</tspan>") if is_balanced else ("", "")
    bold = plain.replace("\0", begin).replace("\1", end)
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-size='{size:g}' opacity='{opacity:g}'>"
        f"{bold}</text>"
    )
