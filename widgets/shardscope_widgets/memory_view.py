"""Where every byte goes: stacked bars against what the card has, and a table that explains each number."""

from __future__ import annotations

from html import escape
from textwrap import wrap
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

import shardscope as ss
from shardscope.memory.report import COMPONENTS, MemoryReport, StageMemory
from shardscope.memory.words import gib
from shardscope_widgets.theme import COMPONENT_COLOURS, STYLE
from shardscope_widgets.words import device_count

GIB = 2**30
MAX_BARS = 16
ROW_PIXELS = 26


class MemoryView(widgets.VBox):
    """One bar for all GPUs, or one a pipeline stage; redrawn in place when ``show`` gets another plan."""

    def __init__(self, plan: ss.Plan | None = None) -> None:
        self.report: MemoryReport | None = None
        self.figure = _empty_figure()
        self.caption = widgets.HTML()
        self.caption.add_class("ss-hint")
        self.table = widgets.HTML()
        super().__init__([widgets.HTML(f"<style>{STYLE}</style>"), self.figure, self.caption, self.table])
        self.add_class("ss-root")
        self.add_class("ss-memory")
        if plan is not None:
            self.show(plan)

    def show(self, plan: ss.Plan, report: MemoryReport | None = None) -> None:
        """Draw a plan's memory; ``report`` saves asking the plan again."""
        report = report or plan.memory()
        self.report = report
        stages = _shown_stages(report)
        labels = [_label(stage, len(report.by_stage)) for stage in stages]
        capacity = report.usable_bytes / GIB
        fullest = max(stage.peak_bytes for stage in stages) / GIB
        with self.figure.batch_update():
            for trace, name in zip(self.figure.data, COMPONENTS, strict=True):
                trace.y = labels
                trace.x = [stage.components[name] / GIB for stage in stages]
                trace.customdata = [_hover(stage, name) for stage in stages]
            axis = max(fullest * 1.02, capacity * 1.03)
            self.figure.layout.xaxis.range = [0, axis]
            self.figure.layout.yaxis.range = [len(labels) - 0.5, -0.5]
            self.figure.layout.height = 52 + ROW_PIXELS * max(1, len(labels)) + (8 if len(labels) == 1 else 0)
            self.figure.layout.shapes = [_capacity_line(capacity)]
            self.figure.layout.annotations = [
                _total(label, stage, report) for label, stage in zip(labels, stages, strict=True)
            ]
        self.caption.value = _caption(plan, report, stages)
        self.table.value = _table(report)


def _empty_figure() -> go.FigureWidget:
    bars = [
        go.Bar(
            name=name.replace("_", " "),
            orientation="h",
            x=[],
            y=[],
            marker={"color": COMPONENT_COLOURS[name], "line": {"width": 0}},
            hovertemplate="%{customdata}<extra></extra>",
        )
        for name in COMPONENTS
    ]
    figure = go.FigureWidget(
        bars,
        layout={
            "barmode": "stack",
            "bargap": 0.28,
            "height": 86,
            "autosize": True,
            "margin": {"l": 78, "r": 116, "t": 6, "b": 30},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "showlegend": False,
            "hoverlabel": {"align": "left"},
            "xaxis": {"ticksuffix": " GiB", "zeroline": False, "fixedrange": True, "nticks": 9},
            "yaxis": {"fixedrange": True, "showgrid": False, "zeroline": False, "type": "category"},
            # Zero: a redraw that moves would say that something happened which did not.
            "transition": {"duration": 0},
        },
    )
    figure._config = {"displayModeBar": False, "responsive": True}
    return figure


def _shown_stages(report: MemoryReport) -> list[StageMemory]:
    """All stages, or evenly chosen ones (the first, the last and the worst among them) where there are many."""
    stages = list(report.by_stage)
    if len(stages) <= MAX_BARS:
        return stages
    step = (len(stages) - 1) / (MAX_BARS - 1)
    chosen = {round(index * step) for index in range(MAX_BARS)} | {report.worst_stage.stage}
    return [stages[index] for index in sorted(chosen)]


def _label(stage: StageMemory, num_stages: int) -> str:
    return "predicted" if num_stages == 1 else f"stage {stage.stage}"


def _hover(stage: StageMemory, name: str) -> str:
    peak = stage.peak
    term = peak.terms.get(name)  # type: ignore[call-overload]
    if term is None:
        return ""
    lines = wrap(escape(term.explain()), 72)
    head = f"<b>{name.replace('_', ' ')}: {gib(term.num_bytes)} GiB</b>"
    return "<br>".join([head, *lines])


def _capacity_line(capacity: float) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": capacity,
        "x1": capacity,
        "y0": -0.04,
        "y1": 1.04,
        "line": {"width": 2, "color": "#66707a"},
    }


def _total(label: str, stage: StageMemory, report: MemoryReport) -> dict[str, Any]:
    band = max(report.high_bytes - report.peak_bytes, report.peak_bytes - report.low_bytes)
    text = f"<b>{gib(stage.peak_bytes)}</b> GiB"
    if len(report.by_stage) == 1:
        text += f" ± {gib(band)}"
    return {
        "x": 1,
        "xref": "paper",
        "xanchor": "left",
        "xshift": 8,
        "y": label,
        "yref": "y",
        "text": text,
        "showarrow": False,
        "font": {"size": 13},
    }


def _caption(plan: ss.Plan, report: MemoryReport, stages: list[StageMemory]) -> str:
    alike = f"all {device_count(plan.cluster)} alike" if len(report.by_stage) == 1 else (
        f"{len(report.by_stage)} pipeline stages of {plan.world_size // plan.degrees.pp:,} ranks each"
        + (f", {len(stages)} shown" if len(stages) < len(report.by_stage) else "")
    )
    moment = {
        "backward": "as backward starts" if report.worst_stage.peak.fraction < 0.5 else "at the end of backward",
        "forward": "at the end of forward",
        "optimizer": "in the optimizer step",
        "rest": "between steps",
        "initialisation": "while it is made",
    }[report.peak_phase]
    card = plan.cluster.gpu.memory_bytes / GIB / (
        plan.cluster.gpus_per_node if plan.cluster.gpu.memory_is_shared else 1
    )
    return (
        f"{alike} · peak {moment} · line: {gib(report.usable_bytes)} of {gib(card * GIB)} GiB usable · "
        f"likely {gib(report.low_bytes)} to {gib(report.high_bytes)} GiB"
    )


def _table(report: MemoryReport) -> str:
    """Every component with its share; opening a row explains it."""
    rows = []
    for name, value in report.components.items():
        share = 100 * value / max(1, report.peak_bytes)
        why = report.explain(name).partition(" = ")[2] or report.explain(name).partition(": ")[2]
        rows.append(
            f"<details name='ss-why'><summary><i style='background:{COMPONENT_COLOURS[name]}'></i>"
            f"<span>{name.replace('_', ' ')}</span><em>{gib(value)} GiB</em><em>{share:.0f} %</em></summary>"
            f"<p>{escape(why)}</p></details>"
        )
    worst = f" (stage {report.worst_stage.stage})" if len(report.by_stage) > 1 else ""
    return f"<h2>At the peak{worst}</h2><div class='ss-legend'>{''.join(rows)}</div>"
