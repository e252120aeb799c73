"""The main button's offer and the Studio's verdict, as unit tests ask for them."""

from __future__ import annotations

import shardscope as ss
from shardscope.memory.report import MemoryReport
from shardscope.planner.verdict import assess_plan
from shardscope_widgets.memory.verdict_line import write_verdict
from shardscope_widgets.pickers import RunOptions, TaskPicker
from shardscope_widgets.run.launching.launch_offer import LaunchOffer, build_offer


def offer_for(plan: ss.Plan, machine: ss.Cluster, report: MemoryReport) -> LaunchOffer:
    """Return what a new Studio's button would start on ``machine``."""
    return build_offer(plan, machine, report, TaskPicker(RunOptions()))


def read_verdict(plan: ss.Plan, report: MemoryReport) -> str:
    """Return the second line of the Studio's head."""
    return write_verdict(plan, report, assess_plan(plan, report))
