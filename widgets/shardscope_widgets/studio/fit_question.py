"""The confirmation shown before "Make it fit" changes the framework, GPUs, model or training objective."""

from __future__ import annotations

import shardscope as ss
from shardscope.core.number_format import format_gib
from shardscope.planner.advice.descriptions import name_plan
from shardscope.planner.repairs.make_it_fit import Fit
from shardscope.planner.repairs.repairs import MAX_TIMES_SLOWER

RESULT_FIELDS = ("method", "precision", "optimizer", "quantization", "seq_len", "global_batch_size")
"""Recipe fields that change the training result."""


def write_fit_question(plan: ss.Plan, fit: Fit) -> tuple[str, str] | None:
    """Return the notice and its button label, or None if ``fit`` needs no confirmation."""
    fitting_plan = fit.plan
    memory = f"{format_gib(fitting_plan.memory().peak_bytes)} GiB"
    same_nouns = (plan.architecture, plan.cluster) == (fitting_plan.architecture, fitting_plan.cluster)
    if not same_nouns or any(
        getattr(plan.recipe, name) != getattr(fitting_plan.recipe, name) for name in RESULT_FIELDS
    ):
        return (
            "No layout of any framework fits this model, training and GPUs.",
            f"Change {fit.text}: {memory}",
        )
    if plan.layout.framework == fitting_plan.layout.framework:
        return None
    title = plan.layout.title
    notice = f"No {title} layout fits."
    if fit.own_framework_fits:
        notice = f"Every {title} layout that fits is over {MAX_TIMES_SLOWER:.0f} times slower."
    return notice, f"Use {name_plan(fitting_plan, plan.recipe)}, {memory}"
