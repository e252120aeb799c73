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
    """Report a learning rate of 0, or far from those of published runs of this size, scaled to the batch."""
    rate = getattr(case.task, "learning_rate", None)
    if rate is None:
        return
    # Fine-tuning takes smaller rates than training from random weights, so weights= selects other references.
    begins_from_weights = getattr(case.task, "weights", None) is not None
    usual = find_usual_rate(case.plan, begins_from_weights=begins_from_weights)
    if rate == 0:
        advised = _find_own_rate(case) or (None if usual is None else usual.recommended)
        why = "With a learning rate of 0 no step changes the weights: the run learns nothing."
        yield _make_finding(case, "danger", why, 0.0, advised)
    # The published runs are supervised; DPO takes rates a twentieth as large.
    elif usual is not None and not usual.allows(rate) and getattr(case.task, "objective", "sft") != "dpo":
        own = _find_own_rate(case)
        advised = own if own is not None and usual.allows(own) else usual.recommended
        severity, why = _choose_severity(rate, usual), _explain_rate(rate, usual)
        yield _make_finding(case, severity, why, rate / usual.rate, advised)


def _make_finding(case: Case, severity: Severity, why: str, number: float, advised: float | None) -> Finding:
    return Finding(
        name=NAME,
        severity=severity,
        why=why,
        number=number,
        change="another learning_rate" if advised is None else f"learning_rate={advised:g}",
        task=None if advised is None else replace_task_fields(case.task, learning_rate=advised),
    )


def _find_own_rate(case: Case) -> float | None:
    """Return the rate that a fine-tune recommends, which knows its data; None for other tasks."""
    if getattr(case.task, "weights", None) is None:
        return None
    unset = replace_task_fields(case.task, learning_rate=None)
    return float(unset.peak_rate(case.plan)) if hasattr(unset, "peak_rate") else None


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
