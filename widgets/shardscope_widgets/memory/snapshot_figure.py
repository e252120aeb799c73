"""Chart of a memory snapshot over time: live bytes by component, stacked, and the peak."""

from __future__ import annotations

import plotly.graph_objects as go

from shardscope.core.number_format import format_gib
from shardscope.trace.memory_timeline import BEFORE_HISTORY, MemoryTimeline
from shardscope_widgets.kit.numbers import Unit
from shardscope_widgets.kit.theme import BESIDE_COLOURS, COMPONENT_COLOURS, COMPONENT_PATTERNS, FONT

NAMES = {BEFORE_HISTORY: "before the history"}
COLOURS = {**COMPONENT_COLOURS, **BESIDE_COLOURS, BEFORE_HISTORY: COMPONENT_COLOURS["parameters"]}


def draw_snapshot(timeline: MemoryTimeline) -> go.Figure:
    """Return the live bytes of ``run.memory().snapshot(rank).timeline()`` as a chart."""
    points = timeline.list_points()
    unit = Unit.for_bytes(timeline.peak_bytes)
    x = points if timeline.seconds is None else timeline.seconds[points]
    figure = go.Figure()
    # The largest component at the bottom; steps, because memory changes at once.
    for name, values in timeline.num_bytes.items():
        figure.add_scatter(
            x=x,
            y=values[points] / unit.num_bytes,
            name=NAMES.get(name, name.replace("_", " ")),
            stackgroup="all",
            line={"width": 0, "color": COLOURS[name], "shape": "hv"},
            fillcolor=COLOURS[name],
            fillpattern={"shape": COMPONENT_PATTERNS.get(name, "")},
            hovertemplate=f"%{{y:.3~f}} {unit.name}",
        )
    event = timeline.peak_event
    figure.add_annotation(
        x=float(event if timeline.seconds is None else timeline.seconds[event]),
        y=timeline.peak_bytes / unit.num_bytes,
        text=f"{format_gib(timeline.peak_bytes)} GiB",
        showarrow=True,
        arrowhead=2,
        ay=-28,
    )
    return figure.update_layout(
        xaxis_title="allocations and frees" if timeline.seconds is None else "seconds",
        yaxis={"title": unit.name, "rangemode": "tozero"},
        hovermode="x unified",
        height=320,
        margin={"l": 60, "r": 16, "t": 32, "b": 44},
        font=FONT,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )
