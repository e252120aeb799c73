"""One line about a plan's memory: whether it fits, and how much it takes."""

from __future__ import annotations

from html import escape

import shardscope as ss
from shardscope.core.number_format import format_gib
from shardscope.memory.report import MemoryReport
from shardscope.planner.verdict import Verdict, describe_place

STATE_CLASSES = {"fits": "ss-fits", "tight": "ss-tight", "unknown": "ss-tight", "does not fit": "ss-lacks"}
STATE_SIGNS = {"fits": "✓", "tight": "!", "unknown": "?", "does not fit": "✕"}
"""A symbol for each state, so that it does not depend on colour alone."""


def render_verdict(plan: ss.Plan, report: MemoryReport, verdict: Verdict) -> str:
    """Return the line of :func:`write_verdict` as HTML."""
    text = write_verdict(plan, report, verdict)
    tooltip = text if verdict.state == "fits" else verdict.reason
    return (
        f"<div class='ss-verdict {STATE_CLASSES[verdict.state]}' data-state='{verdict.state}' "
        f"data-said='verdict' title='{escape(tooltip, quote=True)}'>"
        f"<i class='ss-sign' aria-hidden='true'>{STATE_SIGNS[verdict.state]}</i>{escape(text)}</div>"
    )


def write_verdict(plan: ss.Plan, report: MemoryReport, verdict: Verdict) -> str:
    """Return one line such as ``Fits: 54.0 of 79.1 GiB on each GPU``, or why the plan may not fit."""
    usable = format_gib(report.usable_bytes)
    memory = f"{format_gib(report.peak_bytes)} of {usable} GiB on {describe_place(plan, report)}"
    if verdict.state == "does not fit":
        return f"Does not fit: {verdict.reason[:1].lower()}{verdict.reason[1:].rstrip('.')}"
    if verdict.state == "tight":
        return f"Tight: {memory}; may run out of memory"
    if verdict.state == "unknown":
        needs = " and ".join(
            f"{format_gib(place.needed_bytes)} GiB of {place.name}" for place in verdict.unknown
        )
        return f"Fits if {'each' if plan.cluster.num_nodes > 1 else 'the'} node has {needs}"
    return f"Fits: {memory}"
