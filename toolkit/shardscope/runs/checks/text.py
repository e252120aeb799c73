"""Checks of the text of ``Pretrain``: too short for one batch, or repeated too many times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardscope.core.finding import Finding
from shardscope.planner.checks.case import Case, replace_plan_fields, replace_task_fields
from shardscope.training.data.tokenizer import SHIPPED_TEXT

MAX_EPOCHS = 4
"""Number of epochs up to which repeated text is almost as good as new text (Muennighoff et al. 2023,
arXiv:2305.16264)."""
SHIPPED_TOKENS = 373_161
"""Number of tokens of the shipped corpus with its own tokenizer; a test recounts them."""


def check_text_length(case: Case) -> Iterator[Finding]:
    """Find a batch with more windows than the text has, so that ranks read the same ones, or many epochs.

    The size of the user's own text is its number of bytes, an upper bound of its tokens: every finding is
    correct, but some are missed.
    """
    tokens = _count_tokens(case)
    if tokens is None:
        return
    recipe = case.plan.recipe
    windows, batch = tokens // recipe.seq_len, recipe.global_batch_size
    # First case: a step needs more windows than there are. Suggest the largest batch that the plan can split.
    if batch > windows:
        at_once = recipe.micro_batch_size * case.plan.degrees.data_parallel
        largest, shorter = windows - windows % at_once, tokens // batch
        # The batch needs at least one micro-batch per pipeline stage; otherwise suggest a shorter seq_len.
        if largest < at_once * case.plan.degrees.pp:
            largest = 0
        if windows:
            why = (
                f"A step takes {batch:,} windows of {recipe.seq_len:,} tokens, and the text has at most "
                f"{windows:,}: in every step ranks read each about {batch / windows:.2g} times."
            )
        else:
            why = f"The text has at most {tokens:,} tokens, less than one window of {recipe.seq_len:,}."
        fixed = {"global_batch_size": largest} if largest else {"seq_len": shorter}
        plan = replace_plan_fields(case.plan, recipe=fixed)
        change = "A longer text"
        if largest:
            change = f"global_batch_size={largest}"
        elif plan is not None:  # Not 0, nor a length that the layout cannot split.
            change = f"A longer text, or seq_len={shorter}"
        yield Finding(
            name="ranks-read-the-same-text",
            # With any window the run ends, with the gradient of fewer sequences than it computes.
            severity="warning" if windows else "danger",
            why=why,
            number=batch / max(1, windows),
            change=change,
            plan=plan,
        )
        return
    # Second case: the whole run reads the text several times.
    epochs = (getattr(case.task, "planned_steps", None) or 0) * batch / windows
    if epochs > MAX_EPOCHS:
        fewer = max(1, MAX_EPOCHS * windows // batch)
        yield Finding(
            name="text-read-many-times",
            severity="hint",
            why=f"The run reads the text at least {epochs:.1f} times; beyond {MAX_EPOCHS} passes it teaches "
            "less and less (Muennighoff et al. 2023).",
            number=epochs,
            change=f"num_steps={fewer}, or a longer text",
            task=replace_task_fields(case.task, num_steps=fewer),
        )


def _count_tokens(case: Case) -> int | None:
    """Return the number of tokens of the task's text or an upper bound; None without a task or file."""
    task = case.task
    text = getattr(task, "plain_text", None)
    if text is None or not hasattr(task, "planned_steps"):
        return None
    if text == SHIPPED_TEXT and getattr(task, "weights", None) is None:
        return SHIPPED_TOKENS
    try:
        # Plus one for the end-of-text token.
        return Path(text).stat().st_size + 1
    except (OSError, TypeError):
        return None
