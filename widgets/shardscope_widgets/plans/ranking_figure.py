"""The one figure of the ranking view: every plan that was evaluated, speed against memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from shardscope_widgets.kit.chart import Chart, survive_reload
from shardscope_widgets.plans.ranking_rows import marks, signs

if TYPE_CHECKING:
    from shardscope.planner.ranking import Ranking

GIB = 2**30
PIXELS = 300
SHOWN_OVER_CAPACITY = 1.5
"""How far beyond the card's memory plans are drawn: those that need ten cards' say nothing."""
INK = "#7f8790"


def empty_figure() -> Chart:
    """A trace for each framework, the front, and the plan that is chosen; without data."""
    traces: list[Any] = [
        go.Scatter(
            name=sign.title,
            mode="markers",
            marker={"symbol": sign.symbol, "color": sign.colour, "size": 6, "opacity": 0.75},
            hovertemplate=f"{sign.title}: %{{x:.3g}} GiB, %{{y:,.3~s}} tokens/s per GPU<extra></extra>",
        )
        for sign in signs().values()
    ]
    front = go.Scatter(
        name="front",
        mode="lines",
        line={"width": 1.5, "color": INK, "shape": "hv"},
        hovertemplate="front: %{y:,.3~s} tokens/s per GPU need %{x:.3g} GiB<extra></extra>",
    )
    chosen = go.Scatter(
        name="this plan",
        mode="markers",
        marker={"symbol": "circle-open", "size": 15, "line": {"width": 2, "color": INK}, "color": INK},
        hovertemplate="this plan: %{x:.3g} GiB, %{y:,.3~s} tokens/s per GPU<extra></extra>",
    )
    figure = Chart([*traces, front, chosen], layout=_layout())
    figure._config = {"displayModeBar": False, "responsive": True}
    return survive_reload(figure)


def _layout() -> dict[str, Any]:
    return {
        "autosize": True,
        "height": PIXELS,
        "margin": {"l": 56, "r": 16, "t": 24, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hoverlabel": {"align": "left"},
        "hovermode": "closest",
        "xaxis": {
            "title": {"text": "peak memory of a GPU, GiB", "font": {"size": 12}, "standoff": 6},
            "zeroline": False,
            "fixedrange": True,
            "nticks": 8,
        },
        "yaxis": {"zeroline": False, "fixedrange": True, "nticks": 6, "tickformat": "~s"},
        "transition": {"duration": 0},
    }


def ring(figure: Chart, chosen: tuple[float, float] | None) -> None:
    """Mark the plan that is applied, by its peak bytes and a GPU's tokens a second; None: no mark."""
    place = {"x": [chosen[0] / GIB], "y": [chosen[1]]} if chosen else {"x": [], "y": []}
    figure.redraw([*({} for _ in figure.data[:-1]), place], {})


def draw(figure: Chart, ranking: Ranking) -> int:
    """Show every plan in its place; how many marks that took."""
    memory = ranking.peak_bytes.astype(float)
    speed = ranking.tokens_per_second_per_gpu
    capacity = float(ranking.cluster.usable_bytes_per_gpu)
    near = np.flatnonzero((memory <= SHOWN_OVER_CAPACITY * capacity) & np.isfinite(speed))
    names = ranking.framework
    widest = max(capacity * 1.06, float(memory[near].max(initial=0.0)) * 1.02)
    highest = float(speed[near].max(initial=0.0)) * 1.08 or 1.0
    shown = marks(ranking, near, (0.0, widest), (0.0, highest))
    traces: list[dict[str, Any]] = []
    for name in signs():
        own = shown[names[shown] == name]
        traces.append({"x": (memory[own] / GIB).tolist(), "y": speed[own].tolist()})
    front = ranking.pareto()[::-1]
    traces.append({"x": (memory[front] / GIB).tolist(), "y": speed[front].tolist()})
    traces.append({"x": [], "y": []})
    line = {"width": 2, "color": INK}
    end = capacity / GIB
    figure.redraw(
        traces,
        {
            "xaxis.range": [0, widest / GIB],
            "yaxis.range": [0, highest],
            "shapes": [
                {"type": "line", "xref": "x", "yref": "paper", "x0": end, "x1": end, "y0": 0, "y1": 1,
                 "line": line},
            ],
            "annotations": [
                {"x": end, "xref": "x", "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False,
                 "text": f"{end:.3g} GiB usable", "font": {"size": 12}},
                {"x": 0, "xref": "paper", "xanchor": "left", "xshift": -50, "y": 1, "yref": "paper",
                 "yanchor": "bottom", "showarrow": False, "text": "tokens/s per GPU", "font": {"size": 12}},
            ],
        },
    )  # fmt: skip
    return len(shown)


def key(ranking: Ranking) -> str:
    """What each mark is, as HTML."""
    there = set(np.unique(ranking.framework).tolist())
    parts = [
        f"<span><b style='color:{sign.colour}'>{sign.text}</b> {sign.title}</span>"
        for name, sign in signs().items()
        if name in there
    ]
    return f"<div class='ss-key'>{''.join(parts)}<span>— fastest with this much memory</span></div>"


def counted(ranking: Ranking, num_marks: int) -> str:
    """``12,032 plans evaluated in 0.41 s, 3,204 fit``, and what the chart leaves out of them."""
    num, fits = ranking.num_evaluated, ranking.num_feasible
    words = f"{num:,} plans evaluated in {ranking.seconds:.2f} s, {fits:,} fit"
    if num_marks < num:
        words += f"; {num_marks:,} marks stand for those that need up to {SHOWN_OVER_CAPACITY:g} cards"
    return words
