"""A rehearsal in this process: the same code and the same report, without the seconds that a new one imports.

That ``plan.rehearse()`` runs in a process of its own is tested where that is the question.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shardscope.core.plan import Plan
from shardscope.memory.report import MemoryReport
from shardscope.rehearsal.result import RehearsedStage, build_report


def list_stages(plan: Plan) -> list[RehearsedStage]:
    """Rehearse every pipeline stage of ``plan`` with its framework's own code on fake tensors."""
    framework: Any = import_module(f"shardscope.frameworks.{plan.layout.framework}.rehearsal.rehearse")
    stages: list[RehearsedStage] = framework.rehearse(plan, lambda words, fraction: None)
    return stages


def rehearse_in_this_process(plan: Plan) -> MemoryReport:
    """Return the report of ``plan.rehearse()``, computed in this process."""
    return build_report(plan, list_stages(plan))
