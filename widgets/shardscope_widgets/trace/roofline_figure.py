"""The roofline of a trace's GPU, with each kernel whose FLOPs and bytes are known (Williams et al. 2009)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import plotly.graph_objects as go

from shardscope.core.cluster import Gpu
from shardscope.trace import Trace
from shardscope.trace.analysis.kernels import Kernels, find_gpu
from shardscope_widgets.kit.numbers import format_three_digits
from shardscope_widgets.kit.theme import FONT, RANK_COLOURS

HEIGHT = 240
MOST_POINTS = 200
"""Maximum points: the kernels with most time."""
_SMALLEST, _LARGEST = 7.0, 22.0
"""Diameters of a point in pixels: its area grows with the kernel's time."""
_ROOF = "rgba(105,115,130,0.9)"


@dataclass(frozen=True)
class Point:
    """One kernel on one rank."""

    name: str
    kind: str
    flops_per_byte: float
    tflops: float
    share: float
    peak_tflops: float

    @property
    def describe(self) -> str:
        """The point's tooltip, as HTML."""
        name = self.name if len(self.name) <= 60 else self.name[:59] + "…"
        return (
            f"<b>{escape(name)}</b><br>{format_three_digits(self.tflops)} TFLOP/s, "
            f"{100 * self.tflops / self.peak_tflops:.0f} % of the peak of its type<br>"
            f"{format_three_digits(self.flops_per_byte)} FLOP/byte, {100 * self.share:.1f} % of kernel time"
        )


def list_points(kernels: Kernels) -> list[Point]:
    """Return the kernels whose FLOPs, bytes and GPU are known, most time first."""
    points = [
        Point(
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
    ridge = peak * 1e12 / gpu.memory_bandwidth_bytes_per_second
    bound = [point for point in points if point.flops_per_byte < point.peak_tflops / peak * ridge]
    total = sum(point.share for point in points)
    share = sum(point.share for point in bound) / total if total else 0.0
    sentence = (
        f"On the roofline of {gpu.name}, {share:.0%} of the time of the kernels with known FLOPs is where "
        f"memory bounds them, below {ridge:,.0f} FLOP/byte at the peak of their type. The further a point is "
        "below the line, the more a better kernel could win."
    )
    return _draw(points, gpu, peak, ridge), sentence


def _draw(points: Sequence[Point], gpu: Gpu, peak: float, ridge: float) -> go.Figure:
    lowest = min(ridge / 8, *(point.flops_per_byte for point in points))
    highest = max(ridge * 8, *(point.flops_per_byte for point in points))
    bandwidth = peak / ridge
    # Logarithms are taken here: saved pictures draw linear axes only.
    low, high = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    bottom = math.floor(
        min(math.log10(min(point.tflops for point in points)), math.log10(lowest * bandwidth))
    )
    top = math.log10(peak) + 0.3
    figure = go.Figure()
    figure.add_scatter(
        x=[low, math.log10(ridge), high],
        y=[math.log10(10**low * bandwidth), math.log10(peak), math.log10(peak)],
        mode="lines",
        name=f"{gpu.name}",
        line={"color": _ROOF, "width": 2},
        hoverinfo="skip",
    )
    largest = max(point.share for point in points)
    kinds = list(dict.fromkeys(point.kind for point in points))
    for number, kind in enumerate(kinds):
        some = [point for point in points if point.kind == kind]
        figure.add_scatter(
            x=[math.log10(point.flops_per_byte) for point in some],
            y=[math.log10(point.tflops) for point in some],
            mode="markers",
            name=kind.replace("_", "-"),
            marker={
                "color": RANK_COLOURS[number % len(RANK_COLOURS)],
                "size": [max(_SMALLEST, _LARGEST * math.sqrt(point.share / largest)) for point in some],
                "opacity": 0.8,
                "line": {"width": 0},
            },
            customdata=[point.describe for point in some],
            hovertemplate="%{customdata}<extra></extra>",
        )
    grid = {"gridcolor": "rgba(128,128,128,.2)", "zeroline": False, "fixedrange": True}
    return figure.update_layout(
        xaxis={
            **grid,
            "title": {"text": "FLOP per byte of operands and results", "standoff": 4},
            "range": [low, high],
            **_label_powers(low, high),
        },
        yaxis={**grid, "title": "TFLOP/s", "range": [bottom, top], **_label_powers(bottom, math.floor(top))},
        height=HEIGHT,
        autosize=True,
        margin={"l": 62, "r": 24, "t": 8, "b": 44},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        showlegend=True,
        hovermode="closest",
        hoverlabel={"align": "left"},
        font=FONT,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )


def _label_powers(low: int, high: int) -> dict[str, object]:
    powers = list(range(low, high + 1))
    return {"tickvals": powers, "ticktext": [f"{10.0**power:,.{max(0, -power)}f}" for power in powers]}
