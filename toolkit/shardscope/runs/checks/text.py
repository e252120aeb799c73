"""Ranks that see the same data: a text too short for one batch, or read more often than it teaches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardscope.core.finding import Finding
from shardscope.planner.checks.case import Case, changed_plan, changed_task
from shardscope.training.data.tokenizer import SHIPPED_TEXT

MAX_EPOCHS = 4
"""Up to so many passes repeated text teaches almost as much as new text (Muennighoff et al. 2023,
arXiv:2305.16264)."""
SHIPPED_TOKENS = 373_161
"""Of the shipped corpus with its own tokenizer; a test counts them anew."""


def same_windows(case: Case) -> Iterator[Finding]:
    """``Pretrain`` deals windows of a text: where a batch takes more than there are, ranks read the same.

    A text or tokenizer of one's own is counted by bytes: a token is at least one, so that what is found is
    certain, and some of it is missed.
    """
    tokens = _num_tokens(case)
    if tokens is None:
        return
    recipe = case.plan.recipe
    windows, batch = tokens // recipe.seq_len, recipe.global_batch_size
    if batch > windows:
        at_once = recipe.micro_batch_size * case.plan.degrees.data_parallel
        largest, shorter = windows - windows % at_once, tokens // batch
        # A batch that leaves pipeline stages without micro-batches would be grown again.
        if largest < at_once * case.plan.degrees.pp:
            largest = 0
        yield Finding(
            name="ranks-read-the-same-text",
            severity="danger",
            why=f"A step takes {batch:,} windows of {recipe.seq_len:,} tokens, and the text has at most "
            f"{windows:,}: in every step ranks read each about {batch / max(1, windows):.2g} times.",
            number=batch / max(1, windows),
            change=f"global_batch_size={largest}" if largest else f"A longer text, or seq_len={shorter}",
            plan=changed_plan(
                case.plan, recipe={"global_batch_size": largest} if largest else {"seq_len": shorter}
            ),
        )
        return
    epochs = getattr(case.task, "num_steps", 0) * batch / windows
    if epochs > MAX_EPOCHS:
        fewer = max(1, MAX_EPOCHS * windows // batch)
        yield Finding(
            name="text-read-many-times",
            severity="hint",
            why=f"The run reads the text at least {epochs:.1f} times; beyond {MAX_EPOCHS} passes it teaches "
            "less and less (Muennighoff et al. 2023).",
            number=epochs,
            change=f"num_steps={fewer}, or a longer text",
            task=changed_task(case.task, num_steps=fewer),
        )


def _num_tokens(case: Case) -> int | None:
    """Tokens of the task's text, or the most that there can be; None: no such task, or no such file."""
    task = case.task
    if not hasattr(task, "text") or not hasattr(task, "num_steps"):
        return None
    if task.text is None and getattr(task, "weights", None) is None:
        return SHIPPED_TOKENS
    try:
        # And the mark at its end.
        return Path(task.text or SHIPPED_TEXT).stat().st_size + 1
    except (OSError, TypeError):
        return None
