"""The recommended peak learning rate of a fine-tune, to which a task's None resolves, with its source."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.planner.checks.usual_rates import scale_rate
from shardscope.training.preferences.settings import PAIR_RATE_SHARE

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.training.preferences.settings import Objective

FULL_RATE = 2e-5
"""Learning rate of Llama 2's supervised fine-tuning (Touvron et al. 2023, arXiv:2307.09288, section 3.1)."""
FULL_RATE_TOKENS = 64 * 4096
"""Tokens per batch of that run."""
ADAPTER_RATE = 2e-4
"""Learning rate of QLoRA for 7B and 13B (Dettmers et al. 2023, arXiv:2305.14314, table 9)."""
LARGE_ADAPTER_RATE = 1e-4
"""Learning rate of QLoRA for 33B and 65B, from the same table."""
LARGE_FROM = 30e9
"""Parameters from which :data:`LARGE_ADAPTER_RATE` is the default."""
SMALL_BELOW = 4e8
"""Parameters below which a model learns examples at :data:`SMALL_FULL_RATE`."""
SMALL_FULL_RATE = 3e-5
"""With SmolLM2-135M-Instruct on 200 rows it learned as much as 1e-4 and kept 21 of 24 general answers, where
1e-4 kept 16 (docs/finetune.md)."""
SMALL_ADAPTER_RATE = 1e-3
"""Ten times 5e-5 * (2000 / hidden size)^0.781, the best rate of LoRA on examples for Llama models (Schulman
et al. 2025, "LoRA Without Regret"): for hidden sizes from 576 to 960, rounded."""


class Rate(NamedTuple):
    """A learning rate with its reason."""

    value: float
    why: str


def recommend_rate(plan: Plan, *, on_examples: bool, objective: Objective = "sft") -> Rate:
    """Return the peak learning rate for the plan's model, method and batch.

    ``on_examples``: the task trains on rows, not on one long text.
    """
    if objective == "dpo":
        supervised = recommend_rate(plan, on_examples=on_examples)
        return Rate(
            float(f"{supervised.value * PAIR_RATE_SHARE:.2g}"),
            f"A twentieth of the supervised rate, as DPO's 1e-6 (Rafailov et al. 2023, appendix B; trl's "
            f"default) is of {FULL_RATE:g}. {supervised.why}",
        )
    num_parameters, recipe = plan.architecture.num_parameters, plan.recipe
    if on_examples and num_parameters < SMALL_BELOW:
        if recipe.has_adapters:
            rate = SMALL_ADAPTER_RATE
            why = (
                "the best for LoRA of small models, which take higher rates than large ones (Schulman et al. "
                '2025, "LoRA Without Regret")'
            )
        else:
            rate = SMALL_FULL_RATE
            why = (
                "the rate at which small models learn their rows and forget little: at 1e-4, "
                "SmolLM2-135M-Instruct lost a third of its general answers (docs/finetune.md)"
            )
    elif recipe.has_adapters:
        is_large = num_parameters >= LARGE_FROM
        rate, sizes = (LARGE_ADAPTER_RATE, "33B and 65B") if is_large else (ADAPTER_RATE, "7B and 13B")
        why = f"QLoRA's for {sizes}, in all its batches (Dettmers et al. 2023, arXiv:2305.14314, table 9)"
    else:
        rate = FULL_RATE
        why = "Llama 2's for supervised fine-tuning (Touvron et al. 2023, arXiv:2307.09288, section 3.1)"
    tokens = recipe.global_batch_size * recipe.seq_len
    if tokens <= FULL_RATE_TOKENS:
        return Rate(rate, f"{rate:g} is {why}; smaller batches keep it.")
    scaled = float(f"{scale_rate(rate, FULL_RATE_TOKENS, tokens).square_root:.1g}")
    return Rate(
        scaled,
        f"{rate:g} is {why}; {tokens / FULL_RATE_TOKENS:.2g} times Llama 2's {FULL_RATE_TOKENS:,} tokens per "
        "batch take the square root of that times the rate (Malladi et al. 2022, arXiv:2205.10287).",
    )
