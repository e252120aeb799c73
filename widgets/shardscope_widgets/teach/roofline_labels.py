"""Names of the points of a roofline, placed so that none lies on another, on a point or on the roof.

Names are to the right of vertical leaders that run down from the points: the further left a point, the lower
its name. So no leader crosses a name, at any width of the chart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardscope_widgets.trace.roofline_figure import Extent, Roof, RooflinePoint

_FONT_SIZE, _CHARACTER, _LINE = 11, 6.2, 14
"""Size of a name's font, and the mean width of a character and the height of a line, in pixels."""
_BELOW = 19
"""Pixels from a point's centre down to the middle of its name."""
_NARROW, _HIGH = 255, 185
"""Pixels of the axes of the narrowest chart, in a page of 360 pixels, and of the lowest."""
_RIGHT = 20
"""Pixels to the right of the axes that a name may use."""
_GAP = 6
"""Pixels between a name and the next, or a point."""
_NEAR_ROOF = 0.25
"""Powers of ten below the peak from which a name above the roof is read as the point's."""
_LEADER = "rgba(128,128,128,.55)"


class Labels(NamedTuple):
    """Annotations and shapes of a plotly layout."""

    annotations: list[dict[str, object]]
    shapes: list[dict[str, object]]


class _Name(NamedTuple):
    """The name of points that coincide."""

    text: str
    x: float
    y: float
    """Powers of ten."""
    left: float
    """Pixels from the left end of the narrowest chart."""

    @property
    def width(self) -> float:
        return _CHARACTER * len(self.text)

    @property
    def shift(self) -> float:
        """Pixels from the point to the left end of the name: further where a narrow chart would cut it."""
        return min(-4.0, _NARROW + _RIGHT - self.left - self.width)


def place_labels(points: Sequence[RooflinePoint], roof: Roof, extent: Extent) -> Labels:
    """Return the names of the points, of those that coincide together, and the leaders to them."""
    pixel = (extent.top - extent.bottom) / _HIGH
    every = list(_group_points(points, extent))
    names = every.copy()
    labels = Labels([], [])
    # Nothing else is above the roof, where the last name can extend to both sides.
    last = names[-1]
    peak = math.log10(roof.peak_tflops)
    if len(names) > 1 and last.x > math.log10(roof.ridge) and peak - last.y < _NEAR_ROOF:
        names.pop()
        labels.annotations.append(_write_name(last, peak, up=11))
    below: list[tuple[_Name, float]] = []
    for name in reversed(names):
        start, end = name.left + name.shift - _GAP, name.left + name.width + _GAP
        under = min(one.y for one in every if start < one.left < end) - _BELOW * pixel
        middle = min([under, *(lower - _LINE * pixel for one, lower in below if one.left < end)])
        below.append((name, middle))
        labels.annotations.append(_write_name(name, middle))
        if middle < name.y - 1.2 * _BELOW * pixel:
            labels.shapes.append(_draw_leader(name, middle + 0.5 * _LINE * pixel))
    return labels


def _group_points(points: Sequence[RooflinePoint], extent: Extent) -> Iterator[_Name]:
    """Yield the names from left to right."""
    groups: list[list[RooflinePoint]] = []
    for point in sorted(points, key=lambda point: point.flops_per_byte):
        for group in groups:
            if _is_near(group[0], point):
                group.append(point)
                break
        else:
            groups.append([point])
    for group in groups:
        x, y = math.log10(group[0].flops_per_byte), math.log10(group[0].tflops)
        text = ", ".join(dict.fromkeys(one.name.partition("_proj")[0] for one in group))
        yield _Name(text, x, y, _NARROW * (x - extent.low) / (extent.high - extent.low))


def _is_near(one: RooflinePoint, other: RooflinePoint) -> bool:
    """Return whether two points are at about the same place."""
    across, up = one.flops_per_byte / other.flops_per_byte, one.tflops / other.tflops
    return abs(math.log10(across)) < 0.03 and abs(math.log10(up)) < 0.1


def _write_name(name: _Name, y: float, up: float = 0) -> dict[str, object]:
    """Return the annotation with its middle at ``y``, or ``up`` pixels above."""
    return {
        "text": name.text,
        "x": name.x,
        "y": y,
        "xanchor": "left",
        "xshift": round(name.shift),
        "yshift": up,
        "showarrow": False,
        "font": {"size": _FONT_SIZE},
    }


def _draw_leader(name: _Name, end: float) -> dict[str, object]:
    ends = {"x0": name.x, "x1": name.x, "y0": name.y, "y1": end}
    return {"type": "line", "layer": "below", "line": {"color": _LEADER, "width": 1}, **ends}
