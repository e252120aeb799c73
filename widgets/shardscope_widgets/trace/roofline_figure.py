"""The roofline of a GPU with operators as points (Williams et al. 2009): a trace's kernels, or a plan's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

import plotly.graph_objects as go

from shardscope.trace import Trace
from shardscope.trace.analysis.kernels import Kernels, find_gpu
from shardscope_widgets.kit.numbers import format_three_digits
from shardscope_widgets.kit.theme import FONT, RANK_COLOURS

HEIGHT = 240
MOST_POINTS = 200
"""Maximum kernels of a trace: those with most time."""
_SMALLEST, _LARGEST = 7.0, 22.0
"""Diameters of a point in pixels: its area grows with the operator's time."""
_ROOF = "rgba(105,115,130,0.9)"
_HEADROOM = 0.3
"""Powers of ten between the peak and the upper end of the picture."""


@dataclass(frozen=True)
class RooflinePoint:
    """One operator."""

    name: str
    kind: str
    flops_per_byte: float
    tflops: float
    share: float
    """Its share of the time that :attr:`share_of` names."""
    peak_tflops: float
    """Peak of its dtype."""
    share_of: str = "kernel time"

    @property
    def describe(self) -> str:
        """The point's tooltip, as HTML."""
        name = self.name if len(self.name) <= 60 else self.name[:59] + "…"
        return (
            f"<b>{escape(name)}</b><br>{format_three_digits(self.tflops)} TFLOP/s, "
            f"{100 * self.tflops / self.peak_tflops:.0f} % of the peak of its type<br>"
            f"{format_three_digits(self.flops_per_byte)} FLOP/byte, "
            f"{100 * self.share:.1f} % of {self.share_of}"
        )


class Roof(NamedTuple):
    """The limits of one dtype on one GPU."""

    name: str
    peak_tflops: float
    bytes_per_second: float

    @property
    def ridge(self) -> float:
        """FLOP per byte from which the peak bounds an operator, and not memory."""
        return self.peak_tflops * 1e12 / self.bytes_per_second


class Extent(NamedTuple):
    """The picture's ends, as powers of ten."""

    low: int
    high: int
    bottom: int
    top: float


def list_points(kernels: Kernels) -> list[RooflinePoint]:
    """Return the kernels whose FLOPs, bytes and GPU are known, most time first."""
    points = [
        RooflinePoint(
            row["name"],
            row["kind"],
            float(row["tflops"] * 1e12 / row["bytes_per_second"]),
            row["tflops"],
            row["share"],
            row["tflops"] / row["peak_share"],
        )
        for row in kernels
        if row["tflops"] and row["bytes_per_second"] and row["peak_share"]
    ]
    return sorted(points, key=lambda point: -point.share)[:MOST_POINTS]


def draw_roofline(trace: Trace) -> tuple[go.Figure, str] | None:
    """Return the chart and its sentence; None if no kernel has known FLOPs on a GPU of the catalogue."""
    points = list_points(trace.kernels())
    known = (find_gpu(name) for name in trace.device_names.values())
    gpu = next((one for one in known if one is not None), None)
    if not points or gpu is None or gpu.memory_bandwidth_bytes_per_second is None:
        return None
    peak = max(point.peak_tflops for point in points)
    roof = Roof(gpu.name, peak, gpu.memory_bandwidth_bytes_per_second)
    bound = [point for point in points if point.flops_per_byte < point.peak_tflops / peak * roof.ridge]
    total = sum(point.share for point in points)
    share = sum(point.share for point in bound) / total if total else 0.0
    sentence = (
        f"On the roofline of {gpu.name}, {100 * share:.0f} % of the time of the kernels with known FLOPs is "
        f"where memory bounds them, below {roof.ridge:,.0f} FLOP/byte at the peak of their type. The further "
        "a point is below the line, the more a better kernel could win."
    )
    extent, largest = find_extent(points, [roof]), max(point.share for point in points)
    kinds = list(dict.fromkeys(point.kind for point in points))
    traces = [build_roof(roof, extent)] + [
        build_points([point for point in points if point.kind == kind], number, largest)
        for number, kind in enumerate(kinds)
    ]
    return go.Figure(traces, layout={**build_axes(extent), **build_style(HEIGHT)}), sentence


# ---- Shared with a plan's roofline (teach/roofline_view.py)


def find_extent(points: Sequence[RooflinePoint], roofs: Sequence[Roof]) -> Extent:
    """Return the ends of a picture with these points and roofs, the ridges well inside."""
    ridges = [roof.ridge for roof in roofs]
    lowest = min(min(ridges) / 8, *(point.flops_per_byte for point in points))
    highest = max(max(ridges) * 8, *(point.flops_per_byte for point in points))
    low, high = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    # Where the roof starts, so that it is not cut off at the bottom.
    attained = 10.0**low * roofs[0].bytes_per_second / 1e12
    bottom = math.floor(math.log10(min(attained, *(point.tflops for point in points))))
    return Extent(low, high, bottom, math.log10(max(roof.peak_tflops for roof in roofs)) + _HEADROOM)


def build_roof(roof: Roof, extent: Extent, dash: str = "solid") -> dict[str, object]:
    """Return a roof as a trace. Logarithms are taken here: saved pictures draw linear axes only."""
    start = math.log10(10.0**extent.low * roof.bytes_per_second / 1e12)
    peak = math.log10(roof.peak_tflops)
    return {
        "type": "scatter",
        "x": [extent.low, math.log10(roof.ridge), extent.high],
        "y": [start, peak, peak],
        "mode": "lines",
        "name": roof.name,
        "line": {"color": _ROOF, "width": 2, "dash": dash},
        "hoverinfo": "skip",
    }


def build_points(points: Sequence[RooflinePoint], number: int, largest_share: float) -> dict[str, object]:
    """Return the points of the ``number``-th kind as a trace."""
    return {
        "type": "scatter",
        "x": [math.log10(point.flops_per_byte) for point in points],
        "y": [math.log10(point.tflops) for point in points],
        "mode": "markers",
        "name": points[0].kind.replace("_", "-") if points else "",
        "marker": {
            "color": RANK_COLOURS[number % len(RANK_COLOURS)],
            "size": [
                max(_SMALLEST, _LARGEST * math.sqrt(point.share / (largest_share or 1.0))) for point in points
            ],
            "opacity": 0.8,
            "line": {"width": 0},
        },
        "customdata": [point.describe for point in points],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def build_axes(extent: Extent) -> dict[str, object]:
    """Return both axes with their ranges and labels."""
    grid = {"gridcolor": "rgba(128,128,128,.2)", "zeroline": False, "fixedrange": True}
    return {
        "xaxis": {
            **grid,
            "title": {"text": "FLOP per byte of operands and results", "standoff": 4},
            # In the corner the first labels of both axes would touch.
            "ticklabelstandoff": 5,
            "range": [extent.low, extent.high],
            **_label_powers(extent.low, extent.high),
        },
        "yaxis": {
            **grid,
            "title": {"text": "TFLOP/s"},
            "range": [extent.bottom, extent.top],
            **_label_powers(extent.bottom, math.floor(extent.top)),
        },
    }


def build_style(height: int) -> dict[str, object]:
    """Return the rest of the layout."""
    return {
        "height": height,
        "autosize": True,
        "margin": {"l": 62, "r": 24, "t": 8, "b": 44},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "showlegend": True,
        "hovermode": "closest",
        "hoverlabel": {"align": "left"},
        "font": FONT,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }


def _label_powers(low: int, high: int) -> dict[str, object]:
    powers = list(range(low, high + 1))
    return {"tickvals": powers, "ticktext": [f"{10.0**power:,.{max(0, -power)}f}" for power in powers]}
