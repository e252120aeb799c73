"""The Studio's headline: what is trained on what, and whether it fits."""

from __future__ import annotations

import re
from html import escape

import shardscope as ss
from shardscope.memory.report import MemoryReport
from shardscope.planner.verdict import Verdict
from shardscope_widgets.kit.display_names import describe_devices, format_name
from shardscope_widgets.memory.verdict_line import render_verdict

FORM_FACTOR = re.compile(r" (SXM|PCIe|OAM)(?= |$)")
NODES = re.compile(r"^[\d,]+ nodes of \d+")
"""Parts left out of the short line; the full name is in the tooltip."""


def render_headline(plan: ss.Plan, report: MemoryReport, verdict: Verdict) -> str:
    """Return the plan and its verdict as HTML. Long ones are truncated and show the full text on hover."""
    rank = plan.recipe.adapter_rank
    methods = {"full": "full training", "lora": f"LoRA rank {rank}", "qlora": f"QLoRA rank {rank}"}
    method = methods[plan.recipe.method]
    model, gpus = format_name(plan.architecture.name), describe_devices(plan.cluster)
    layout = plan.layout.description
    plain = f"{model} on {gpus} with {layout}, {method}, {plan.recipe.precision}"
    short = FORM_FACTOR.sub("", NODES.sub(f"{plan.cluster.num_gpus:,}", gpus))
    # Full training is the rule, and its words would not fit beside the numbers in a window of 1,440 pixels.
    how = "" if plan.recipe.method == "full" else f"{method}, "
    what = (
        f"<b>{escape(model)}</b> on <b>{escape(short)}</b> with <b>{escape(layout)}</b>, "
        f"{escape(how)}{escape(plan.recipe.precision)}"
    )
    return (
        f"<div class='ss-what' title='{escape(plain, quote=True)}'>{what}</div>"
        f"{render_verdict(plan, report, verdict)}"
    )
