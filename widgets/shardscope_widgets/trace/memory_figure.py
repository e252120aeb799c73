"""Memory over time: allocations that the profiler recorded, and a run's memory snapshot by component."""

from __future__ import annotations

from collections import defaultdict
from html import escape

import plotly.graph_objects as go

from shardscope.runs.explain.measured import MeasuredMemory
from shardscope.trace import Trace
from shardscope.trace.analysis.memory import MemoryRow
from shardscope_widgets.kit.numbers import Unit
from shardscope_widgets.kit.theme import FONT, RANK_COLOURS, RANK_DASHES
from shardscope_widgets.memory.snapshot_figure import draw_snapshot
from shardscope_widgets.trace.analysis_page import (
    NONE,
    AnalysisPage,
    Heading,
    Interval,
    Row,
    TableWriter,
    describe_option,
)

MAX_LINES = 8
"""Maximum devices that are drawn; the table has all."""
RECORD_MEMORY = f"This recording has no allocations. {describe_option('memory')}"


def describe_memory(trace: Trace, measured: MeasuredMemory | None) -> AnalysisPage:
    """Return memory over time, by the recording's allocations and by the run's snapshot if it took one."""
    sentences, figures, tables = [], [], []
    writer = TableWriter()
    devices: dict[tuple[int, str], list[MemoryRow]] = defaultdict(list)
    for row in trace.memory():
        devices[row["rank"], row["device"]].append(row)
    if devices:
        figures.append(_draw_lines(devices))
        tables.append(_write_peaks(devices, writer))
    else:
        sentences.append(RECORD_MEMORY)
    if measured is not None and measured.snapshot_files:
        rank = min(measured.snapshot_files)
        try:
            timeline = measured.snapshot(rank).timeline()
        except (ValueError, OSError) as error:
            sentences.append(str(error))
        else:
            figures.append(draw_snapshot(timeline))
            sentences.append(f"The memory snapshot of rank {rank}: {timeline}.")
    return AnalysisPage(sentences=sentences, tables=tables, figures=figures, intervals=writer.intervals)


def _write_peaks(devices: dict[tuple[int, str], list[MemoryRow]], writer: TableWriter) -> str:
    peaks = {key: max(rows, key=lambda row: row["allocated_bytes"]) for key, rows in devices.items()}
    unit = Unit.for_bytes(max(row["allocated_bytes"] for row in peaks.values()))
    written = []
    for (rank, device), rows in devices.items():
        peak = peaks[rank, device]
        reserved = [row["reserved_bytes"] for row in rows if row["reserved_bytes"]]
        written.append(
            Row(
                (
                    f"{device}, rank {rank}",
                    unit.format(peak["allocated_bytes"]),
                    unit.format(max(reserved)) if reserved else NONE,
                    f"{peak['seconds']:.3f}",
                ),
                Interval(peak["seconds"] - 1e-4, peak["seconds"] + 1e-4, rank),
            )
        )
    headings = (
        Heading("device"),
        Heading(f"allocated, {unit.name}", "most bytes of tensors during the recording"),
        Heading(f"reserved, {unit.name}", "most bytes that the caching allocator held"),
        Heading("peak at, s", "time in the trace"),
    )
    return writer.write(headings, written)


def _draw_lines(devices: dict[tuple[int, str], list[MemoryRow]]) -> go.Figure:
    unit = Unit.for_bytes(max(row["allocated_bytes"] for rows in devices.values() for row in rows))
    figure = go.Figure()
    for number, ((rank, device), rows) in enumerate(list(devices.items())[:MAX_LINES]):
        name = f"rank {rank}, {escape(device)}"
        figure.add_scatter(
            x=[row["seconds"] for row in rows],
            y=[row["allocated_bytes"] / unit.num_bytes for row in rows],
            name=name,
            mode="lines",
            line={
                "color": RANK_COLOURS[number % len(RANK_COLOURS)],
                "dash": RANK_DASHES[number // len(RANK_COLOURS) % len(RANK_DASHES)],
                "width": 1.6,
                "shape": "hv",
            },
            hovertemplate=f"%{{y:.3~f}} {unit.name} at %{{x:.4~f}} s<extra>{name}</extra>",
        )
    return figure.update_layout(
        xaxis={"title": {"text": "seconds", "standoff": 4}, "showgrid": False, "zeroline": False},
        yaxis={"title": unit.name, "rangemode": "tozero", "nticks": 5, "gridcolor": "rgba(128,128,128,.2)"},
        height=220,
        autosize=True,
        margin={"l": 56, "r": 12, "t": 8, "b": 40},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        showlegend=len(devices) > 1,
        font=FONT,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )
