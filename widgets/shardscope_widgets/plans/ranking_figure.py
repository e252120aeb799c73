"""The chart of a search: the peak memory and rate of every plan, and whether it can run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from shardscope.core.cluster import name_device
from shardscope.core.number_format import format_gib
from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.kit.display_names import name_rate_unit
from shardscope_widgets.kit.numbers import format_short
from shardscope_widgets.plans.feasibility import Feasibility, judge_plan
from shardscope_widgets.plans.ranking_rows import Sign, build_signs, choose_marks
from shardscope_widgets.plans.ranking_table import describe_layout

if TYPE_CHECKING:
    from shardscope.planner.search.ranking import Ranking

GIB = 2**30
PIXELS = 272
SHOWN_OVER_CAPACITY = 1.5
"""Plans up to this multiple of a GPU's memory are drawn; those far beyond it are of no interest."""
INK = "#7f8790"
CURRENT = "#e8590c"
"""The ring of the current plan, which stands out between a thousand marks in both themes."""
TOOLTIP_CHARACTERS = 46
"""Maximum characters of a tooltip line, for a chart of 390 pixels."""


def create_ranking_figure() -> Chart:
    """Return a chart without data: traces for each framework, crosses, the Pareto front, the current plan."""
    # Filled marks are drawn over hollow ones, with their crosses in between.
    hollow = [
        _create_marks(f"{sign.title}, cannot be run", f"{sign.symbol}-open", sign)
        for sign in build_signs().values()
    ]
    filled = [_create_marks(sign.title, sign.symbol, sign) for sign in build_signs().values()]
    # No symbols with a cross: plotly has them for circles, squares and diamonds, but not for triangles.
    crosses = go.Scatter(
        name="cannot be launched here",
        mode="markers",
        marker={"symbol": "x-thin", "size": 4, "line": {"width": 1, "color": INK}},
        hoverinfo="skip",
    )
    front = go.Scatter(
        name="front",
        mode="lines",
        line={"width": 1.5, "color": INK, "shape": "hv"},
        hoverinfo="skip",
    )
    on_screen = go.Scatter(
        name="this plan",
        mode="markers",
        marker={
            "symbol": "circle-open",
            "size": 18,
            "line": {"width": 3, "color": CURRENT},
            "color": CURRENT,
        },
        hoverinfo="skip",
        # The ring of a plan near an axis would be cut off.
        cliponaxis=False,
    )
    figure = Chart([*hollow, crosses, *filled, front, on_screen], layout=_build_layout())
    figure.label = "Tokens/s and peak memory of all plans. The table below lists the fastest."
    figure._config = {"displayModeBar": False, "responsive": True}
    return figure


def _create_marks(name: str, symbol: str, sign: Sign) -> go.Scatter:
    return go.Scatter(
        name=name,
        mode="markers",
        marker={
            "symbol": symbol,
            "color": sign.colour,
            "size": 7,
            "opacity": 0.8,
            # plotly draws hollow symbols by their line alone; filled ones need none.
            "line": {"width": 1.4 if symbol.endswith("-open") else 0},
        },
        hovertemplate="%{text}<extra></extra>",
    )


def _build_layout() -> dict[str, object]:
    # No grid lines: they would cross the labels at marks and at the memory line.
    axis = {"zeroline": False, "fixedrange": True, "showgrid": False, "ticks": "outside", "ticklen": 4}
    line = {"showline": True, "linecolor": INK, "tickcolor": INK, "linewidth": 1}
    return {
        "autosize": True,
        "height": PIXELS,
        "margin": {"l": 52, "r": 16, "t": 40, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hoverlabel": {"align": "left", "font": {"size": 12}, "namelength": -1},
        "hovermode": "closest",
        "xaxis": {
            **axis,
            **line,
            "title": {"font": {"size": 12}, "standoff": 6},
            "nticks": 8,
        },
        "yaxis": {**axis, **line, "nticks": 6, "tickformat": "~s"},
    }


def on_plan_click(figure: Chart, callback: Callable[[int], None]) -> None:
    """Call ``callback`` with the row of the plan whose mark was clicked."""

    def handle_click(trace_index: int, point_index: int, customdata: object) -> None:
        # The front, the crosses and the current plan have no row.
        if isinstance(customdata, int):
            callback(customdata)

    figure.on_click(handle_click)


def mark_current_plan(figure: Chart, chosen: tuple[float, float] | None) -> None:
    """Mark the current plan, given as peak bytes and tokens per second per GPU; None removes the mark."""
    place: dict[str, object] = {"x": [], "y": []}
    if chosen is not None:
        place = {"x": [chosen[0] / GIB], "y": [chosen[1]]}
    figure.redraw([*({} for _ in figure.data[:-1]), place], {})


def draw_ranking(figure: Chart, ranking: Ranking) -> int:
    """Draw a mark for every chart cell that contains a plan. Return the number of marks."""
    memory = ranking.peak_bytes.astype(float)
    capacity = float(ranking.cluster.usable_bytes_per_gpu)
    # Plans far beyond the capacity would squeeze those that fit into a corner.
    near = np.flatnonzero(memory <= SHOWN_OVER_CAPACITY * capacity)
    speed = np.full(len(memory), np.nan)
    speed[near] = ranking.get_tokens_per_second_per_gpu(near)
    near = near[np.isfinite(speed[near])]
    # Among the plans in one cell, prefer one that fits.
    fits = ranking.is_feasible & ranking.is_room_known
    near = near[np.argsort(~fits[near], kind="stable")]
    widest = max(capacity * 1.06, float(memory[near].max(initial=0.0)) * 1.02)
    highest = float(speed[near].max(initial=0.0)) * 1.08 or 1.0
    # A browser draws some hundred marks quickly, but a search returns tens of thousands of plans.
    shown = choose_marks(ranking, speed, near, (0.0, widest), (0.0, highest))
    feasibility_by_row = {int(index): judge_plan(ranking, int(index)) for index in shown}
    names = ranking.framework

    def build_points(rows: Iterable[int]) -> dict[str, object]:
        mark_rows = np.array(list(rows), np.int64)
        return {"x": (memory[mark_rows] / GIB).tolist(), "y": speed[mark_rows].tolist()}

    def build_marks(name: str, *, fits: bool) -> dict[str, object]:
        mark_rows = [
            int(row)
            for row in shown[names[shown] == name]
            if (feasibility_by_row[int(row)].kind == "fits") == fits
        ]
        return {
            **build_points(mark_rows),
            "customdata": mark_rows,
            "text": [_write_tooltip(ranking, row, feasibility_by_row[row]) for row in mark_rows],
        }

    crossed = (row for row, one in feasibility_by_row.items() if one.kind == "cannot be launched here")
    traces = [build_marks(name, fits=False) for name in build_signs()]
    traces += [build_points(crossed), *(build_marks(name, fits=True) for name in build_signs())]
    # Ascending in memory, the order in which the line is drawn.
    front = ranking.pareto()[::-1]
    traces += [build_points(front), {"x": [], "y": [], "text": []}]
    end, speed_title = capacity / GIB, f"tokens/s per {name_rate_unit(ranking.cluster)}"
    # Towards the middle, where a narrow chart does not cut it.
    side = "left" if capacity < 0.5 * widest else "right"
    figure.redraw(
        traces,
        {
            "xaxis.range": [0, widest / GIB],
            "xaxis.title.text": f"peak memory of a {name_device(ranking.cluster)}, GiB",
            "yaxis.range": [0, highest],
            "shapes": [
                {"type": "line", "xref": "x", "yref": "paper", "x0": end, "x1": end, "y0": 0, "y1": 1,
                 "line": {"width": 2, "color": INK}},
            ],
            "annotations": [
                # Above the title of the other axis, which it would overlap in a narrow chart.
                {"x": end, "xref": "x", "xanchor": side, "y": 1, "yref": "paper", "yanchor": "bottom",
                 "yshift": 16, "showarrow": False, "text": f"{end:.3g} GiB usable", "font": {"size": 12}},
                {"x": 0, "xref": "paper", "xanchor": "left", "xshift": -46, "y": 1, "yref": "paper",
                 "yanchor": "bottom", "showarrow": False, "text": speed_title, "font": {"size": 12}},
            ],
        },
    )  # fmt: skip
    return len(shown)


def _write_tooltip(ranking: Ranking, index: int, feasibility: Feasibility) -> str:
    """Return the tooltip of a mark: layout, memory, rate, and why the plan cannot be run."""
    plan = ranking.plan(index)
    rate = format_short(float(ranking.get_tokens_per_second_per_gpu(np.array([index]))[0]))
    speed = f"{rate} tokens/s per {name_rate_unit(ranking.cluster)}"
    lines = [
        *_wrap_lines(describe_layout(plan.layout), bold=True),
        f"micro-batch {plan.recipe.micro_batch_size}, recompute {plan.recipe.recompute}",
        f"{format_gib(int(ranking.peak_bytes[index]))} GiB, {speed}",
    ]
    for reason in feasibility.reasons:
        lines += _wrap_lines(reason)
    return "<br>".join([*lines, "Click to apply"])


def _wrap_lines(text: str, *, bold: bool = False) -> list[str]:
    lines = [escape(line, quote=False) for line in wrap(text, TOOLTIP_CHARACTERS)]
    return [f"<b>{line}</b>" for line in lines] if bold else lines


def render_legend(ranking: Ranking, *, has_current: bool) -> str:
    """Return the chart's legend as HTML; ``has_current``: with the mark of the current plan."""
    drawn = set(np.unique(ranking.framework).tolist())
    parts = [
        f"<span><b class='ss-sign' style='color:{sign.colour}'>{sign.text}</b> {sign.title}</span>"
        for name, sign in build_signs().items()
        if name in drawn
    ]
    parts += [
        "<span><b>○</b> does not fit</span>",
        "<span><b>⊗</b> cannot be launched here</span>",
        "<span><b>—</b> fastest plan up to this memory</span>",
    ]
    if has_current:
        parts.append(f"<span><b style='color:{CURRENT}'>◯</b> this plan</span>")
    return f"<div class='ss-key'>{''.join(parts)}</div>"


def describe_counts(ranking: Ranking, num_marks: int) -> str:
    """Return ``12,032 plans evaluated in 0.41 s, 3,204 fit`` and how many of them the chart shows."""
    num, fits = ranking.num_evaluated, ranking.num_feasible
    text = f"{num:,} plans evaluated in {ranking.seconds:.2f} s, {fits:,} fit"
    if num_marks < num:
        text += f"; {num_marks:,} points shown, up to {SHOWN_OVER_CAPACITY:g} times the usable memory"
    return text
