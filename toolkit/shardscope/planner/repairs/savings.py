"""Single changes that save memory in a plan that fits, at little or no cost in time."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING

from shardscope.frameworks.registry import is_trained
from shardscope.planner.memory_needs import fits
from shardscope.planner.repairs.repairs import Repair, predict_seconds
from shardscope.planner.repairs.single_changes import list_ladders

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import MemoryReport

MAX_SAVINGS = 3
LEAST_SHARE_SAVED = 0.01
"""Smallest saving, as a share of the GPU's usable bytes; any saving will do if the step is faster."""
LEAST_SHARE_WON = 0.02
"""Smallest gain of such a faster step, as a share of its seconds."""
MOST_SHARE_LOST = 0.15
"""Largest cost, as a share of the step's seconds."""
SAME_TRAINING = ("method", "precision", "optimizer", "micro_batch_size", "global_batch_size", "seq_len")
"""Recipe fields that stay unchanged, because they would change the training."""


def find_savings(plan: Plan, report: MemoryReport) -> list[Repair]:
    """Return single changes that save memory in a plan that fits, at little cost, most bytes first.

    For each recipe field, the cheapest change. Training and layout stay the same.
    """
    seconds = predict_seconds(plan)
    best: dict[str, Repair] = {}
    for ladder in list_ladders(plan):
        for change in ladder:
            # One recipe field at a time: two changes would hide which of them saves, and layouts are the
            # search's topic.
            changed = list_changed_fields(plan, change.plan)
            if len(changed) != 1 or changed[0] in SAME_TRAINING or change.plan.layout != plan.layout:
                continue
            try:
                after = change.plan.memory()
            except ValueError:  # The plan can run, but there are no formulas for it.
                continue
            saved = report.peak_bytes - after.peak_bytes
            if saved <= 0 or not fits(change.plan, after):
                continue
            lost = predict_seconds(change.plan) - seconds
            saves_enough = saved >= LEAST_SHARE_SAVED * report.usable_bytes
            if lost > MOST_SHARE_LOST * seconds or not (saves_enough or -lost >= LEAST_SHARE_WON * seconds):
                continue
            saving = Repair(change.text, change.plan, saved, lost)
            # Of each field the value that costs least time; among equal ones first those that can be launched
            # here, if the plan can be, and of these the one that saves most.
            known = best.get(changed[0])
            if known is None or _rank_cost(plan, saving, seconds) < _rank_cost(plan, known, seconds):
                best[changed[0]] = saving
    return sorted(best.values(), key=lambda saving: -saving.bytes_won)[:MAX_SAVINGS]


def list_changed_fields(before: Plan, after: Plan) -> list[str]:
    """Return the names of the recipe's fields in which two plans differ."""
    recipes = before.recipe, after.recipe
    names = [field.name for field in fields(before.recipe)]
    return [name for name in names if getattr(recipes[0], name) != getattr(recipes[1], name)]


def _rank_cost(plan: Plan, saving: Repair, seconds: float) -> tuple[float, bool, int]:
    """Return the sort key of a change: time lost in whole per cent, then whether it prevents the launch, then
    bytes saved."""
    # Whole per cent, because smaller differences of predicted times mean nothing.
    share = saving.seconds_lost / seconds
    cost = math.inf if math.isnan(share) else max(0, round(100 * share))
    return cost, is_trained(plan) and not is_trained(saving.plan), -saving.bytes_won
