"""Where the time of each rank went: stacked bars of all ranks, and the same numbers as a table."""

from __future__ import annotations

from typing import NamedTuple

import plotly.graph_objects as go

from shardscope.timing.report import format_seconds
from shardscope.trace import Trace
from shardscope.trace.analysis.breakdown import CAUSES
from shardscope_widgets.kit.numbers import Scale
from shardscope_widgets.kit.theme import FONT, PART_COLOURS, PATTERN_CLASSES
from shardscope_widgets.trace.analysis_page import AnalysisPage, Heading, Interval, Row, TableWriter

MAX_RANKS = 64
"""Most ranks that are drawn: of more, those with the least compute."""
LEFT_PIXELS, RIGHT_PIXELS = 64, 72
SMALL = {"size": 12}


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
    Part("copies", PART_COLOURS["offload"], "x", "copies that neither compute nor communication covers"),
    Part("host-bound", "#b4bac2", "", "idle: the host launches work too late"),
    Part("waiting", "#b4bac2", "\\", "idle: the host waits for a collective"),
    Part("data loading", "#ccbb44", "/", "idle: the data loader has no batch yet"),
    Part("other idle", "#d5d9de", "."),
)


def describe_breakdown(trace: Trace) -> AnalysisPage:
    """Return the time of each rank by part, as bars and as a table. The parts add up to the recording."""
    rows = trace.breakdown()
    if not any(row["span_seconds"] for row in rows):
        return AnalysisPage(sentences=["No rank recorded any work, so there is no time to break down."])
    idle: dict[tuple[int, str], float] = {(row["rank"], row["cause"]): row["seconds"] for row in trace.idle()}
    shown = list(rows)
    sentences = []
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
            Heading(part.title, part.hint, swatch=part.colour, pattern=PATTERN_CLASSES.get(part.pattern, ""))
            for part in (PARTS[number] for number in present)
        ),
        Heading("overlapped comm.", "communication while the rank also computes: part of compute"),
    )
    return AnalysisPage(
        sentences=sentences,
        tables=[writer.write(headings, table_rows, most=MAX_RANKS)],
        intervals=writer.intervals,
        figures=[_draw(values, scale, present)],
    )


def _draw(values: dict[int, tuple[float, ...]], scale: Scale, present: list[int]) -> go.Figure:
    ranks = list(values)
    labels = [f"rank {rank}" for rank in ranks]
    figure = go.Figure()
    for number in present:
        part = PARTS[number]
        figure.add_bar(
            name=part.title,
            orientation="h",
            y=labels,
            x=[values[rank][number] * scale.factor for rank in ranks],
            customdata=[
                f"<b>rank {rank}</b><br>{part.title}: {format_seconds(values[rank][number])}, "
                f"{100 * values[rank][number] / (sum(values[rank]) or 1):.0f} %"
                for rank in ranks
            ],
            hovertemplate="%{customdata}<extra></extra>",
            marker={
                "color": part.colour,
                "line": {"width": 0},
                "pattern": {
                    "shape": part.pattern,
                    "size": 6,
                    "solidity": 0.3,
                    "fillmode": "overlay",
                    "fgcolor": "rgba(255,255,255,0.75)",
                },
            },
        )
    longest = max(sum(parts) for parts in values.values())
    row_pixels = 26 if len(ranks) <= 8 else 18 if len(ranks) <= 32 else 14
    totals = [
        {
            "x": 1,
            "xref": "paper",
            "xanchor": "left",
            "xshift": 6,
            "y": label,
            "text": f"{scale.format(sum(values[rank]))} {scale.unit}",
            "showarrow": False,
            "font": SMALL,
        }
        for rank, label in zip(ranks, labels, strict=True)
    ]
    return figure.update_layout(
        barmode="stack",
        bargap=0.25,
        autosize=True,
        height=row_pixels * len(ranks) + 6,
        margin={"l": LEFT_PIXELS, "r": RIGHT_PIXELS, "t": 2, "b": 4},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        showlegend=False,
        font=FONT,
        hovermode="closest",
        hoverlabel={"align": "left"},
        xaxis={"visible": False, "fixedrange": True, "range": [0, 1.01 * longest * scale.factor]},
        yaxis={
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "type": "category",
            "range": [len(ranks) - 0.5, -0.5],
            "categoryorder": "array",
            "categoryarray": labels,
            "tickvals": labels,
            "ticks": "outside",
            "ticklen": 6,
            "tickcolor": "rgba(0,0,0,0)",
            "tickfont": SMALL,
        },
        annotations=totals,
    )
