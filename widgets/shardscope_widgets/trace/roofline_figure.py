"""The roofline of a trace's GPU, with each kernel whose FLOPs and bytes are known (Williams et al. 2009)."""

from __future__ import annotations

import plotly.graph_objects as go

from shardscope.trace import Trace
from shardscope.trace.analysis.kernels import Kernels, find_gpu
from shardscope_widgets.kit.roofline import (
    Roof,
    RooflinePoint,
    build_axes,
    build_points,
    build_roof,
    build_style,
    find_extent,
)

HEIGHT = 240
MOST_POINTS = 200
"""Maximum points: the kernels with most time."""


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
        f"On the roofline of {gpu.name}, {share:.0%} of the time of the kernels with known FLOPs is where "
        f"memory bounds them, below {roof.ridge:,.0f} FLOP/byte at the peak of their type. The further a "
        "point is below the line, the more a better kernel could win."
    )
    extent, largest = find_extent(points, [roof]), max(point.share for point in points)
    kinds = list(dict.fromkeys(point.kind for point in points))
    traces = [build_roof(roof, extent)] + [
        build_points([point for point in points if point.kind == kind], number, largest)
        for number, kind in enumerate(kinds)
    ]
    return go.Figure(traces, layout={**build_axes(extent), **build_style(HEIGHT)}), sentence
