"""Curves of two runs over each other as one inline SVG: no script, no file, nothing to fetch.

It is drawn here and not by the widgets' charts, so that it also shows where no kernel runs. Text and lines
of the axes have the colour of the text around them, in a dark theme too. The runs are told apart by dashes
and by the mark at the end of their curve as well as by colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from shardscope.runs.chart_scale import Scale, of_values

WIDTH, HEIGHT = 460, 200
LEFT, TOP, RIGHT, BOTTOM = 60, 12, 16, 36
"""Margins; the left one has room for "100,000" in every chart, so that steps stand above each other."""
MAX_COLUMNS = 240
"""A curve has its lowest and its highest point in each of so many columns, however long its run was."""
LARGEST = 1e100
"""What is beyond is no loss that anybody reads; its span may not even be a float."""

COLOURS = ("#4477aa", "#ee6677")
"""Those of the first two ranks in the widgets' charts: told apart by colour-blind readers too."""
DASHES = ("none", "6 4")
FONT = "font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-variant-numeric:tabular-nums"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What one run logged under one name."""

    run: str
    points: Mapping[int, float]
    """By step; may be empty, and may hold NaN and infinities."""
    predicted: float | None = None
    """Drawn as a level."""

    @property
    def drawn(self) -> dict[int, float]:
        """The points that have a place on an axis."""
        return {step: value for step, value in self.points.items() if _has_place(value)}

    @property
    def lacks(self) -> list[int]:
        """The steps whose value has none."""
        return [step for step, value in self.points.items() if not _has_place(value)]


def chart(label: str, curves: Sequence[Curve], x: Scale | None, *, from_zero: bool = False) -> str:
    """The curves on the same axes, with ``label`` above and under them what cannot be drawn, in words.

    ``x`` is the axis of steps, of this chart and of those above and below it; None where there are none.
    """
    notes = "".join(f"<div>{escape(words)}</div>" for words in _notes(label, curves))
    picture, how = "", ""
    if x is not None and any(curve.drawn for curve in curves):
        y = _heights(curves, from_zero)
        how = ", logarithmic" if y.is_log else ""
        picture = _svg(label, curves, x, y)
    return (
        f"<figure style='margin:0 0 12px;{FONT};font-size:12px'>"
        f"<figcaption style='font-weight:600'>{escape(label)}{how}</figcaption>{picture}{notes}</figure>"
    )


def legend(curves: Sequence[Curve]) -> str:
    """Whose curve is which, by name."""
    marks = [f"{_line(index, 0, 6, 28)}{_mark(index, 28, 6)}" for index in range(len(curves))]
    words = [escape(curve.run) for curve in curves]
    if any(curve.predicted for curve in curves):
        dots = "stroke='currentColor' stroke-width='1.5' stroke-dasharray='1.5 3'"
        marks.append(f"<line x1='0' y1='6' x2='32' y2='6' {dots}/>")
        words.append("predicted")
    entries = "".join(
        "<span style='display:inline-flex;align-items:center;gap:6px;overflow-wrap:anywhere'>"
        f"<svg width='36' height='12' viewBox='0 0 36 12' aria-hidden='true' style='flex:none'>{mark}</svg>"
        f"{word}</span>"
        for mark, word in zip(marks, words, strict=True)
    )
    return (
        f"<div style='display:flex;flex-wrap:wrap;gap:4px 20px;margin-bottom:8px;{FONT};font-size:13px'>"
        f"{entries}</div>"
    )


def _has_place(value: float) -> bool:
    return math.isfinite(value) and abs(value) < LARGEST


def _heights(curves: Sequence[Curve], from_zero: bool) -> Scale:
    levels = [curve.predicted for curve in curves if curve.predicted]
    values = [value for curve in curves for value in curve.drawn.values()]
    return of_values(values + levels, from_zero=from_zero)


def _notes(label: str, curves: Sequence[Curve]) -> Iterator[str]:
    if not any(curve.points for curve in curves):
        yield f"No {label} was logged."
        return
    for curve in curves:
        if not curve.points:
            yield f"{curve.run} logged no {label}."
        elif lacks := curve.lacks:
            among = f"{len(lacks):,} of {len(curve.points):,} logged steps"
            yield f"{curve.run}: NaN or infinite in {among}, first at step {min(lacks):,}."


def _svg(label: str, curves: Sequence[Curve], x: Scale, y: Scale) -> str:
    across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    bottom = HEIGHT - BOTTOM

    def place(step: float, value: float) -> tuple[float, float]:
        return LEFT + across * x.share(step), bottom - up * y.share(value)

    pieces = []
    for value, word in y.ticks:
        height = place(x.low, value)[1]
        pieces.append(
            f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{height:.1f}' y2='{height:.1f}' "
            "stroke='currentColor' stroke-opacity='.16'/>"
            f"<text x='{LEFT - 9}' y='{height + 4:.1f}' text-anchor='end'>{word}</text>"
        )
    for step, word in x.ticks:
        where = place(step, y.low)[0]
        pieces.append(
            f"<line x1='{where:.1f}' x2='{where:.1f}' y1='{bottom}' y2='{bottom + 4}' stroke='currentColor' "
            "stroke-opacity='.5'/>"
            f"<text x='{where:.1f}' y='{bottom + 17}' text-anchor='middle'>{word}</text>"
        )
    pieces.append(
        f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{bottom}' y2='{bottom}' stroke='currentColor' "
        "stroke-opacity='.5'/>"
        f"<text x='{LEFT + across / 2}' y='{HEIGHT - 4}' text-anchor='middle'>step</text>"
    )
    for index, curve in enumerate(curves):
        if curve.predicted:
            height = place(x.low, curve.predicted)[1]
            pieces.append(
                f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{height:.1f}' y2='{height:.1f}' "
                f"stroke='{COLOURS[index]}' stroke-width='1.5' stroke-dasharray='1.5 3'>"
                f"<title>{escape(curve.run)}: predicted {curve.predicted:,.4g}</title></line>"
            )
        if points := curve.drawn:
            last = max(points)
            at = " ".join(_path([place(*point) for point in run]) for run in _unbroken(curve, x))
            pieces.append(
                f"<path d='{at}' fill='none' stroke='{COLOURS[index]}' stroke-width='1.8' "
                f"stroke-dasharray='{DASHES[index]}' stroke-linejoin='round' stroke-linecap='round'>"
                f"<title>{escape(curve.run)}: {points[last]:,.4g} at step {last:,}</title></path>"
                f"{_mark(index, *place(last, points[last]))}"
            )
    said = escape(f"{label} by step of {' and '.join(curve.run for curve in curves)}")
    return (
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{said}' "
        f"style='display:block;width:100%;max-width:{WIDTH}px;height:auto;overflow:visible' "
        f"fill='currentColor' font-size='12'>{''.join(pieces)}</svg>"
    )


def _unbroken(curve: Curve, x: Scale) -> Iterator[list[tuple[int, float]]]:
    """Stretches of the curve between the steps that have no place, few enough points for any run's length."""
    stretch: list[tuple[int, float]] = []
    for column in _columns(curve, x):
        points = [(step, value) for step, value in column if _has_place(value)]
        if points:
            ends = {min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1]), points[0], points[-1]}
            stretch += sorted(ends)
        if len(points) < len(column) and stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _columns(curve: Curve, x: Scale) -> list[list[tuple[int, float]]]:
    columns: dict[int, list[tuple[int, float]]] = {}
    for step, value in sorted(curve.points.items()):
        columns.setdefault(int(MAX_COLUMNS * x.share(step)), []).append((step, value))
    return list(columns.values())


def _path(points: Sequence[tuple[float, float]]) -> str:
    """A lone point is a dot: a line without length has round ends."""
    steps = [f"{'L' if index else 'M'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(points)]
    return "".join(steps) + ("h0" if len(steps) == 1 else "")


def _line(index: int, x: float, y: float, length: float) -> str:
    return (
        f"<line x1='{x}' y1='{y}' x2='{x + length}' y2='{y}' stroke='{COLOURS[index]}' stroke-width='1.8' "
        f"stroke-dasharray='{DASHES[index]}'/>"
    )


def _mark(index: int, x: float, y: float) -> str:
    """A disc, or a hollow square: where both curves end at one point, both are seen."""
    if index == 0:
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.4' fill='{COLOURS[0]}'/>"
    return (
        f"<rect x='{x - 4:.1f}' y='{y - 4:.1f}' width='8' height='8' fill='none' stroke='{COLOURS[1]}' "
        "stroke-width='1.8'/>"
    )
