"""The learning rate against the global batch: what published runs of such a size had, carried to it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from shardscope.planner.preflight.case import Case
from shardscope.planner.preflight.finding import Finding


class Reference(NamedTuple):
    """One published run with AdamW."""

    name: str
    num_parameters: float
    batch_tokens: float
    learning_rate: float
    source: str


GPT3 = "Brown et al. 2020, table 2.1"
LLAMA = "Touvron et al. 2023, table 2"
REFERENCES = (
    Reference("GPT-3 125M", 125e6, 0.5e6, 6.0e-4, GPT3),
    Reference("GPT-3 350M", 350e6, 0.5e6, 3.0e-4, GPT3),
    Reference("GPT-3 760M", 760e6, 0.5e6, 2.5e-4, GPT3),
    Reference("GPT-3 1.3B", 1.3e9, 1e6, 2.0e-4, GPT3),
    Reference("GPT-3 2.7B", 2.7e9, 1e6, 1.6e-4, GPT3),
    Reference("LLaMA 7B", 6.7e9, 4e6, 3.0e-4, LLAMA),
    Reference("LLaMA 13B", 13.0e9, 4e6, 3.0e-4, LLAMA),
    Reference("LLaMA 33B", 32.5e9, 4e6, 1.5e-4, LLAMA),
    Reference("LLaMA 65B", 65.2e9, 4e6, 1.5e-4, LLAMA),
    Reference("GPT-3 175B", 175e9, 3.2e6, 0.6e-4, GPT3),
    Reference("Llama 3 405B", 405e9, 16e6, 0.8e-4, "Grattafiori et al. 2024, table 3 and section 3.4.1"),
)
NEAR = 3.0
"""A run tells of models up to so many times larger or smaller; beyond, nothing is said."""
TOO_HIGH, TOO_LOW = 3.0, 0.1
"""Times the rules' own range. Published rates of one size differ by 2 to 3 (LLaMA 7B's and GPT-3 6.7B's)."""
BETA_2 = 0.95
"""AdamW's as Pretrain sets it (``training/optimizers.py``)."""
WARM_UP_STEPS = round(2 / (1 - BETA_2))
"""Steps of a linear warm-up without which AdamW's second moment is not settled: 2 / (1 - beta_2), Ma & Yarats
2021 (arXiv:1910.04209)."""


class Scaled(NamedTuple):
    """A learning rate carried from one batch to another."""

    linear: float
    """In proportion (Goyal et al. 2017, section 2.1): SGD's rule."""
    square_root: float
    """By the square root (Malladi et al. 2022, arXiv:2205.10287): Adam's rule."""


def scaled(learning_rate: float, from_batch: float, to_batch: float) -> Scaled:
    """``learning_rate`` of a batch of ``from_batch`` for one of ``to_batch``, in the same unit."""
    ratio = to_batch / from_batch
    return Scaled(learning_rate * ratio, learning_rate * math.sqrt(ratio))


def reference_for(num_parameters: float) -> Reference | None:
    """The published run of the nearest size; None where none is near."""
    best = min(REFERENCES, key=lambda run: abs(math.log(run.num_parameters / num_parameters)))
    ratio = best.num_parameters / num_parameters
    return best if 1 / NEAR <= ratio <= NEAR else None


def rate_against_batch(case: Case) -> Iterator[Finding]:
    """A task's learning rate far from what both rules make of a published run of this size.

    Of runs from random weights: one that begins from a model's own takes smaller steps.
    """
    plan, rate = case.plan, getattr(case.task, "learning_rate", None)
    recipe = plan.recipe
    if getattr(case.task, "weights", None) is not None:
        return
    if not rate or recipe.has_adapters or not recipe.optimizer.startswith(("adamw", "paged_adamw")):
        return
    run = reference_for(plan.architecture.num_parameters)
    if run is None:
        return
    tokens = recipe.global_batch_size * recipe.seq_len
    rules = scaled(run.learning_rate, run.batch_tokens, tokens)
    if TOO_LOW * min(rules) <= rate <= TOO_HIGH * max(rules):
        return
    is_high = rate > max(rules)
    yield Finding(
        name="learning-rate-against-batch",
        severity="danger" if is_high else "hint",
        why=f"{rate:g} is {rate / rules.square_root:.2g} times what {run.name} had ({run.learning_rate:g} at "
        f"{run.batch_tokens / 1e6:g}M tokens a step: {run.source}), carried to {tokens / 1e6:.2g}M tokens: "
        f"{rules.square_root:.2g} by the square-root rule, {rules.linear:.2g} by the linear one.",
        number=rate / rules.square_root,
        change=f"learning_rate={float(f'{rules.square_root:.1g}'):g}",
    )


def short_warm_up(case: Case) -> Iterator[Finding]:
    """AdamW at its full rate before its second moment has settled."""
    task, plan = case.task, case.plan
    steps = getattr(task, "num_steps", None)
    if steps is None or not hasattr(task, "warmup_steps") or "adamw" not in plan.recipe.optimizer:
        return
    warm_up = task.warmup_steps
    if warm_up is None or warm_up >= min(WARM_UP_STEPS, steps // 10):
        return
    yield Finding(
        name="short-warm-up",
        severity="warning",
        why=f"{warm_up} steps of warm-up: with beta_2 {BETA_2} AdamW's second moment settles over about "
        f"{WARM_UP_STEPS} (Ma & Yarats 2021), and a large batch needs them most (Goyal et al. 2017).",
        number=float(warm_up),
        change=f"warmup_steps={min(WARM_UP_STEPS, steps // 10)}, or None",
    )
