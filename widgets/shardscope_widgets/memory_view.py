"""Where every byte goes: bars against what the card has, one step's course, and a table that explains."""

from __future__ import annotations

from html import escape

import ipywidgets as widgets

import shardscope as ss
from shardscope.memory.report import MemoryReport
from shardscope.memory.words import gib
from shardscope_widgets.memory_figure import draw, empty_figure, shown_stages
from shardscope_widgets.sheet import Sheet
from shardscope_widgets.theme import COMPONENT_COLOURS
from shardscope_widgets.words import device_count


class MemoryView(widgets.VBox):
    """One bar for all GPUs, or one a pipeline stage; redrawn in place when ``show`` gets another plan."""

    def __init__(self, plan: ss.Plan | None = None) -> None:
        self.report: MemoryReport | None = None
        self.figure = empty_figure()
        self.caption = widgets.HTML()
        self.caption.add_class("ss-hint")
        self.table = widgets.HTML()
        super().__init__([Sheet(), self.figure, self.caption, self.table])
        self.add_class("ss-root")
        self.add_class("ss-memory")
        if plan is not None:
            self.show(plan)

    def show(self, plan: ss.Plan, report: MemoryReport | None = None) -> None:
        """Draw a plan's memory; ``report`` saves asking the plan again."""
        report = report or plan.memory()
        self.report = report
        draw(self.figure, report)
        self.caption.value = _caption(plan, report)
        self.table.value = _table(report)


def _caption(plan: ss.Plan, report: MemoryReport) -> str:
    num_stages, num_shown = len(report.by_stage), len(shown_stages(report))
    if num_stages == 1:
        alike = f"all {device_count(plan.cluster)} alike" if plan.world_size > 1 else "one GPU"
    else:
        alike = f"{num_stages} pipeline stages of {plan.world_size // plan.degrees.pp:,} ranks each"
        alike += f", {num_shown} shown" if num_shown < num_stages else ""
    moment = {
        "backward": "as backward starts"
        if report.worst_stage.peak.fraction < 0.5
        else "at the end of backward",
        "forward": "at the end of forward",
        "optimizer": "in the optimizer step",
        "rest": "between steps",
        "initialisation": "while it is made",
    }[report.peak_phase]
    sharers = plan.cluster.gpus_per_node if plan.cluster.gpu.memory_is_shared else 1
    return (
        f"{alike} · peak {moment} · line: {gib(report.usable_bytes)} GiB usable of "
        f"{gib(plan.cluster.gpu.memory_bytes / sharers)} · likely {gib(report.low_bytes)} to "
        f"{gib(report.high_bytes)} GiB"
    )


def _table(report: MemoryReport) -> str:
    """Every component with its share; opening a row explains it."""
    rows = []
    for name, value in report.components.items():
        share = 100 * value / max(1, report.peak_bytes)
        words = report.explain(name)
        why = words.partition(" = ")[2] or words.partition(": ")[2]
        rows.append(
            f"<details name='ss-why'><summary><i style='background:{COMPONENT_COLOURS[name]}'></i>"
            f"<span>{name.replace('_', ' ')}</span><em>{gib(value)} GiB</em><em>{share:.0f} %</em></summary>"
            f"<p>{escape(why)}</p></details>"
        )
    worst = f" (stage {report.worst_stage.stage})" if len(report.by_stage) > 1 else ""
    return (
        f"<h2>At the peak{worst} <span class='ss-hint'>open a row for its formula</span></h2>"
        f"<div class='ss-legend'>{''.join(rows)}</div>"
    )
