"""Recommended sequence length of a fine-tune."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from shardscope.training.examples.preview import MAX_CUT

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.training.examples.preview import LengthAdvice, Preview
    from shardscope.training.tasks.finetune import Finetune

CPU_MAX_LENGTH = 2048
"""Longest sequence length recommended on CPU ranks: a step of 8 rows of SmolLM2-135M-Instruct has 17 TFLOP
with it, and 109 with the 8,192 tokens of that model."""
MIN_KEPT_ROWS = 0.9
"""Share of the rows that have to keep an answer at :data:`CPU_MAX_LENGTH`, or longer rows are recommended."""


class Reasoned(NamedTuple):
    """A value with its reason."""

    value: object
    why: str


def choose_length(task: Finetune, plan: Plan, preview: Preview | None) -> Reasoned:
    """Return the sequence length for the lengths of the examples."""
    now, longest = plan.recipe.seq_len, plan.architecture.max_position_embeddings
    if preview is None:
        if task.plain_text is None:
            return Reasoned(now, "task.preview() shows which length fits the data.")
        why = f"A text is cut into windows of any length; the model was made for at most {longest:,} tokens."
        return Reasoned(min(now, longest), why)
    advice = recommend_length(plan, preview)
    # Packed rows have little padding at any length.
    if advice is not None and not (plan.recipe.packing and advice.seq_len < now):
        return Reasoned(advice.seq_len, advice.why)
    cut = preview.cut_at(now)
    why = (
        f"{100 * preview.padding_at(now):.0f} % of rows of {now:,} tokens are padding, and "
        f"{100 * cut:.1f} % of the data are cut off."
    )
    is_worth_saying = cut > MAX_CUT or now > CPU_MAX_LENGTH
    return Reasoned(now, f"{why}{explain_cpu_length(plan)}" if is_worth_saying else why)


def recommend_length(plan: Plan, preview: Preview) -> LengthAdvice | None:
    """Return a better sequence length than that of ``preview``; None if there is none.

    It is at most the model's, and on CPU ranks :data:`CPU_MAX_LENGTH` if that leaves most rows an answer.
    """
    longest, now = plan.architecture.max_position_embeddings, preview.seq_len
    # A preview at a greater length does not know which rows would lose their answers.
    is_known = now is not None and now <= CPU_MAX_LENGTH
    if plan.cluster.gpu.vendor == "cpu" and preview.bad_rows != "refuse" and is_known:
        lost = sum(
            needed is not None and CPU_MAX_LENGTH < needed <= longest
            for needed, _ in preview.counts.lengths_without_loss
        )
        if lost <= (1 - MIN_KEPT_ROWS) * preview.counts.num_rows:
            longest = min(longest, CPU_MAX_LENGTH)
    advice = preview.recommend_length(longest)
    if advice is None:
        return None
    return replace(advice, why=f"{advice.why}{explain_cpu_length(plan, advice.seq_len)}")


def explain_cpu_length(plan: Plan, seq_len: int | None = None) -> str:
    """Return what long rows cost on CPU ranks, after a space; empty on GPUs and for short rows.

    ``seq_len`` defaults to that of the plan.
    """
    seq_len = seq_len or plan.recipe.seq_len
    if plan.cluster.gpu.vendor != "cpu" or seq_len < CPU_MAX_LENGTH:
        return ""
    if seq_len == CPU_MAX_LENGTH:
        return " With longer rows a step may take many minutes on CPU ranks."
    return " A step of such rows may take many minutes on CPU ranks: train them on a GPU, or shorten them."
