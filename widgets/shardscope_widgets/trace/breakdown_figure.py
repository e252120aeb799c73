"""Breakdown of each rank's time: stacked bars of all ranks, and the same numbers as a table."""

from __future__ import annotations

from typing import NamedTuple

import plotly.graph_objects as go

from shardscope.core.number_format import Scale
from shardscope.timing.report import format_seconds
from shardscope.trace import Trace
from shardscope.trace.analysis.breakdown import CAUSES
from shardscope_widgets.kit.theme import PART_COLOURS
from shardscope_widgets.trace.analysis_page import AnalysisPage, Heading, Interval, Row, TableWriter
from shardscope_widgets.trace.stacked_bars import (
    FAINT,
    NEUTRAL,
    BarPart,
    draw_stacked_bars,
    get_pattern_class,
)

MAX_RANKS = 64
"""Maximum ranks that are drawn; of more, those with the least compute."""


class Part(NamedTuple):
    """One part of a rank's time."""

    title: str
    colour: str
    pattern: str = ""
    """plotly's pattern."""
    hint: str = ""


PARTS = (
    Part("compute", PART_COLOURS["matrices"]),
    Part("exposed comm.", PART_COLOURS["tensor_parallel"], "", "communication while nothing is computed"),
    Part("copies", PART_COLOURS["offload"], "x", "copies not overlapped with compute or communication"),
    Part("host-bound", NEUTRAL, "", "idle: the host launches work too late"),
    Part("waiting", FAINT, "\\", "idle: the host waits for a collective"),
    Part("data loading", "#ccbb44", "/", "idle: the data loader has no batch yet"),
    Part("other idle", FAINT, "."),
)


def describe_breakdown(trace: Trace) -> AnalysisPage:
    """Return the time of each rank by part, as bars and as a table. The parts add up to the recording."""
    rows = trace.breakdown()
    if not any(row["span_seconds"] for row in rows):
        return AnalysisPage(sentences=["No rank recorded any work, so there is no time to break down."])
    idle: dict[tuple[int, str], float] = {(row["rank"], row["cause"]): row["seconds"] for row in trace.idle()}
    shown = list(rows)
    num_steps = trace.activity.num_steps
    sentences = [f"Time of the whole recording, {num_steps:,} steps."] if num_steps > 1 else []
    if len(rows) > MAX_RANKS:
        shown = sorted(rows, key=lambda row: row["compute_seconds"])[:MAX_RANKS]
        shown.sort(key=lambda row: row["rank"])
        sentences.append(f"{MAX_RANKS} of {len(rows):,} ranks: those that compute least.")
    scale = Scale.for_seconds(max(row["span_seconds"] for row in shown))
    values = {
        row["rank"]: (
            row["compute_seconds"],
            row["exposed_communication_seconds"],
            row["copy_seconds"],
            *(idle.get((row["rank"], cause), 0.0) for cause in CAUSES),
        )
        for row in shown
    }
    present = [
        number
        for number in range(len(PARTS))
        if any(parts[number] > 0 for parts in values.values()) or not number
    ]
    writer = TableWriter()
    table_rows = [
        Row(
            (
                f"rank {row['rank']}",
                scale.format(row["span_seconds"]),
                *(scale.format(values[row["rank"]][number]) for number in present),
                scale.format(row["overlapped_seconds"]),
            ),
            Interval(row["start_seconds"], row["start_seconds"] + row["span_seconds"], row["rank"]),
        )
        for row in shown
    ]
    headings = (
        Heading("rank"),
        Heading(f"total, {scale.unit}", "from the rank's first work to its last"),
        *(
            Heading(
                part.title,
                part.hint,
                swatch=part.colour,
                pattern=get_pattern_class(part.colour, part.pattern),
            )
            for part in (PARTS[number] for number in present)
        ),
        Heading("overlapped comm.", "communication while the rank also computes: part of compute"),
    )
    return AnalysisPage(
        sentences=sentences,
        tables=[writer.write(headings, table_rows, most=MAX_RANKS)],
        intervals=writer.intervals,
        figures=[_draw_bars(values, scale, present)],
    )


def _draw_bars(values: dict[int, tuple[float, ...]], scale: Scale, present: list[int]) -> go.Figure:
    ranks = list(values)
    parts = [
        BarPart(
            PARTS[number].title,
            PARTS[number].colour,
            PARTS[number].pattern,
            [values[rank][number] for rank in ranks],
            [
                f"<b>rank {rank}</b><br>{PARTS[number].title}: {format_seconds(values[rank][number])}, "
                f"{100 * values[rank][number] / (sum(values[rank]) or 1):.0f} %"
                for rank in ranks
            ],
        )
        for number in present
    ]
    row_pixels = 26 if len(ranks) <= 8 else 18 if len(ranks) <= 32 else 14
    return draw_stacked_bars([f"rank {rank}" for rank in ranks], parts, scale, row_pixels)
