"""The confirmation shown before "Make it fit" changes the framework, GPUs, model or training objective."""

from __future__ import annotations

import shardscope as ss
from shardscope.core.number_format import gib
from shardscope.planner.advice.words import named
from shardscope.planner.repairs.make_it_fit import Fit
from shardscope.planner.repairs.repairs import MAX_TIMES_SLOWER

LEARNT = ("method", "precision", "optimizer", "quantization", "seq_len", "global_batch_size")
"""Recipe fields that change the training result."""


def fit_question(plan: ss.Plan, fit: Fit) -> tuple[str, str] | None:
    """Return the notice and its button label, or None if ``fit`` needs no confirmation."""
    found = fit.plan
    room = f"{gib(found.memory().peak_bytes)} GiB"
    same_nouns = (plan.architecture, plan.cluster) == (found.architecture, found.cluster)
    if not same_nouns or any(getattr(plan.recipe, name) != getattr(found.recipe, name) for name in LEARNT):
        return "No layout of any framework fits as it is.", f"Change {fit.words}: {room}"
    if plan.layout.framework == found.layout.framework:
        return None
    title = plan.layout.title
    words = f"No {title} layout fits."
    if fit.own_framework_fits:
        words = f"With {title}, a step that fits takes over {MAX_TIMES_SLOWER:.0f} times as long."
    return words, f"Use {named(found, plan.recipe)}, {room}"
