"""Checks of the learning rate and the warm-up against published runs of similar size, scaled to the global
batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardscope.core.finding import Finding, Severity
from shardscope.planner.checks.case import Case, replace_task_fields
from shardscope.planner.checks.usual_rates import TOO_HIGH, UsualRate, find_usual_rate

BETA_2 = 0.95
"""AdamW's beta_2 as ``Pretrain`` sets it (``training/optimizers/optimizers.py``)."""
WARM_UP_STEPS = round(2 / (1 - BETA_2))
USUAL_WARM_UP = 0.03  # of all steps: Stanford Alpaca, and QLoRA (Dettmers et al. 2023, table 9)
"""Minimum steps of linear warm-up after which AdamW's second moment is settled: 2 / (1 - beta_2), Ma & Yarats
2021 (arXiv:1910.04209)."""
NAME = "learning-rate-against-batch"


def check_learning_rate(case: Case) -> Iterator[Finding]:
    """Report a learning rate far from those of published runs of this size, scaled to the batch."""
    rate = getattr(case.task, "learning_rate", None)
    # The published runs are supervised; DPO takes rates a twentieth as large.
    if not rate or getattr(case.task, "objective", "sft") == "dpo":
        return
    begins_from_weights = getattr(case.task, "weights", None) is not None
    # Fine-tuning takes smaller rates than training from random weights, so weights= selects other references.
    usual = find_usual_rate(case.plan, begins_from_weights=begins_from_weights)
    if usual is None or usual.allows(rate):
        return
    yield Finding(
        name=NAME,
        severity=_choose_severity(rate, usual),
        why=_explain_rate(rate, usual),
        number=rate / usual.rate,
        change=f"learning_rate={usual.recommended:g}",
        task=replace_task_fields(case.task, learning_rate=usual.recommended),
    )


def _choose_severity(rate: float, usual: UsualRate) -> Severity:
    if rate > TOO_HIGH * usual.highest:
        return "danger"
    return "warning" if rate > usual.highest else "hint"


def _explain_rate(rate: float, usual: UsualRate) -> str:
    run = usual.run
    had = (
        f"{run.name} had ({run.learning_rate:g} at {run.batch_tokens / 1e6:.2g}M tokens per step: "
        f"{run.source})"
    )
    carried = (
        f"carried to {usual.batch_tokens / 1e6:.2g}M tokens: {usual.rules.square_root:.2g} by the "
        f"square-root rule, {usual.rules.linear:.2g} by the linear one"
    )
    rules = "".join(f"; {rule}" for rule in usual.corrections)
    return f"{rate:g} is {rate / usual.rate:.2g} times what {had}, {carried}{rules}."


def check_warm_up(case: Case) -> Iterator[Finding]:
    """Report a warm-up that ends before AdamW's second moment has settled."""
    task, plan = case.task, case.plan
    steps = getattr(task, "planned_steps", None)
    if steps is None or not hasattr(task, "warmup") or "adamw" not in plan.recipe.optimizer:
        return
    warm_up, fields = task.warmup, dict[str, object]()
    if getattr(task, "schedule", None) == "constant":  # It has none.
        warm_up, fields = 0, {"schedule": "constant_with_warmup"}
    elif isinstance(warm_up, float):  # A share of all steps.
        warm_up = math.ceil(steps * warm_up)
    # A short run cannot spend that many steps on it: the usual share of them is enough.
    better = min(WARM_UP_STEPS, math.ceil(USUAL_WARM_UP * steps))
    if warm_up >= better:
        return
    yield Finding(
        name="short-warm-up",
        severity="warning",
        why=f"{warm_up} steps of warm-up: with beta_2 {BETA_2} AdamW's second moment settles over about "
        f"{WARM_UP_STEPS} (Ma & Yarats 2021), and a large batch needs them most (Goyal et al. 2017).",
        number=float(warm_up),
        change=", ".join([*(f"{name}={value!r}" for name, value in fields.items()), f"warmup={better}"]),
        task=replace_task_fields(task, warmup=better, **fields),
    )
