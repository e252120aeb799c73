"""Horizontal stacked bars with their totals at the right, which the pages of the analysis share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from shardscope.core.number_format import Scale
from shardscope_widgets.kit.theme import FONT, PATTERN_CLASSES

LEFT_PIXELS, RIGHT_PIXELS = 78, 72
SMALL = {"size": 12}
# Translucent: an opaque grey that recedes on a white page would be the brightest bar of a dark one.
NEUTRAL = "rgba(105,115,130,0.5)"
"""Colour of time without work."""
FAINT = "rgba(105,115,130,0.25)"
"""Colour of time without work that a pattern tells apart."""
NEUTRALS = frozenset({NEUTRAL, FAINT})


class BarPart(NamedTuple):
    """One part of every bar."""

    title: str
    colour: str
    pattern: str
    """plotly's pattern; empty for a plain colour."""
    seconds: Sequence[float]
    """Its length in each bar."""
    tooltips: Sequence[str]
    """HTML for each bar."""
    opacities: Sequence[float] = ()
    """Opacity of each bar; 1 for all if empty."""


def draw_stacked_bars(
    labels: Sequence[str], parts: Sequence[BarPart], scale: Scale, row_pixels: int
) -> go.Figure:
    """Return one bar for each of ``labels``, from top to bottom."""
    figure = go.Figure()
    for part in parts:
        figure.add_bar(
            name=part.title,
            orientation="h",
            y=list(labels),
            x=[seconds * scale.factor for seconds in part.seconds],
            customdata=list(part.tooltips),
            hovertemplate="%{customdata}<extra></extra>",
            marker={
                "color": part.colour,
                "line": {"width": 0},
                "opacity": list(part.opacities) or 1.0,
                "pattern": {
                    "shape": part.pattern,
                    "size": 6,
                    "solidity": 0.3,
                    "fillmode": "overlay",
                    "fgcolor": NEUTRAL if part.colour in NEUTRALS else "rgba(255,255,255,0.75)",
                    "fgopacity": 1 if part.colour in NEUTRALS else 0.5,
                },
            },
        )
    totals = [sum(part.seconds[number] for part in parts) for number in range(len(labels))]
    return figure.update_layout(
        barmode="stack",
        bargap=0.25,
        autosize=True,
        height=row_pixels * len(labels) + 6,
        margin={"l": LEFT_PIXELS, "r": RIGHT_PIXELS, "t": 2, "b": 4},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        showlegend=False,
        font=FONT,
        hovermode="closest",
        hoverlabel={"align": "left"},
        # Totals are in the right margin: an axis would only add clutter.
        xaxis={
            "visible": False,
            "fixedrange": True,
            "range": [0, 1.01 * max(totals, default=0.0) * scale.factor or 1.0],
        },
        yaxis={
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "type": "category",
            "range": [len(labels) - 0.5, -0.5],
            "categoryorder": "array",
            "categoryarray": list(labels),
            "tickvals": list(labels),
            "ticks": "outside",
            "ticklen": 6,
            "tickcolor": "rgba(0,0,0,0)",
            "tickfont": SMALL,
        },
        annotations=[_build_total(label, total, scale) for label, total in zip(labels, totals, strict=True)],
    )


def get_pattern_class(colour: str, pattern: str) -> str:
    """Return the CSS classes by which a table's swatch has plotly's ``pattern``."""
    name = PATTERN_CLASSES.get(pattern, "")
    return f"{name} ss-neutral" if name and colour in NEUTRALS else name


def _build_total(label: str, seconds: float, scale: Scale) -> dict[str, object]:
    return {
        "x": 1,
        "xref": "paper",
        "xanchor": "left",
        "xshift": 6,
        "y": label,
        "text": f"{scale.format(seconds)} {scale.unit}",
        "showarrow": False,
        "font": SMALL,
    }
