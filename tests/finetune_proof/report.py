"""docs/finetune.md: answers, duration and memory of the fine-tunes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.finetune_proof.fine_tunes import (
    FIRST_STEPS,
    FULL_RATE,
    LORA_RANK,
    LORA_RATE,
    NUM_EPOCHS,
    SEQ_LEN,
    Outcome,
)
from tests.finetune_proof.questions import GENERAL, HELD_OUT, Answers, Question

DOCUMENT = Path(__file__).parents[2] / "docs" / "finetune.md"
MIN_LEARNED = 0.8
"""Smallest fraction of the questions about the product that a fine-tune must answer right."""
MAX_KNOWN = 0.1
"""Largest fraction of them that the base model may answer right."""
MIN_KEPT = 0.8
"""Smallest fraction of the base model's right general answers that a fine-tune must keep."""
EXAMPLES = (0, 12, 27)
"""Questions whose answers are printed."""
GIB = 2**30


def find_shortfalls(base: Answers, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the requirements that the base or a fine-tune does not meet."""
    shortfalls = []
    if base.num_learned > MAX_KNOWN * len(HELD_OUT):
        shortfalls.append(f"the base answers {base.num_learned} of {len(HELD_OUT)} questions")
    for outcome in outcomes:
        name, answers = outcome.fine_tune.name, outcome.answers
        if answers.num_learned < MIN_LEARNED * len(HELD_OUT):
            shortfalls.append(f"{name}: {answers.num_learned} of {len(HELD_OUT)} questions are right")
        if answers.num_kept < MIN_KEPT * base.num_kept:
            shortfalls.append(f"{name}: {answers.num_kept} of {base.num_kept} general answers are left")
    return shortfalls


def write_row(outcome: Outcome) -> str:
    """Return the outcome as a row of the table."""
    answers = outcome.answers
    cells = (
        outcome.fine_tune.name,
        f"{answers.num_learned} of {len(HELD_OUT)}",
        f"{answers.num_kept} of {len(GENERAL)}",
        f"{outcome.first_loss:.2f} to {outcome.last_loss:.3f}",
        f"{outcome.num_steps * outcome.predicted_step_seconds / 60:.1f}",
        f"{outcome.train_seconds / 60:.1f}",
        f"{outcome.predicted_step_seconds:.2f}",
        f"{outcome.step_seconds:.2f}",
        f"{outcome.predicted_peak_bytes / GIB:.2f}",
        f"{outcome.peak_bytes / GIB:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def write_document(base: Answers, outcomes: Sequence[Outcome], versions: str) -> str:
    """Return docs/finetune.md."""
    head = (
        "fine-tune",
        "kettle questions",
        "general questions",
        "loss, first to last",
        "minutes, predicted",
        "measured",
        "seconds per step, predicted",
        "measured",
        "GiB per rank, predicted",
        "measured",
    )
    rows = "\n".join(map(write_row, outcomes))
    return f"""# Fine-tuning test: a small model learns twenty facts

Written by `make finetune-proof`; do not edit.

SmolLM2-135M-Instruct (`make model`) is fine-tuned on two CPU ranks with `notebooks/data/zorblat.jsonl`:
80 questions and answers about an invented kettle (twenty facts, each in four wordings) and 120 general
questions with the base model's own answers. The general ones limit forgetting: with only 34 of them and 60
about the kettle, the model kept 5 of 12 general answers.

The test asks two other wordings of each fact, which are not in the data; the base model gets
{base.num_learned} of these {len(HELD_OUT)} right. It also asks {len(GENERAL)} general questions that are
not in the data; the base model gets {base.num_kept} right. `make finetune-proof` fails if a fine-tune
answers less than 80 % of the kettle questions, or less than 80 % of the general questions that the base
model gets right. An answer is right if it contains the keyword, such as "47 seconds".

Every row is `ss.Finetune(weights, data, num_epochs={NUM_EPOCHS})` with sequences of {SEQ_LEN} tokens, loss on
the answers only, four sequences per step and fp32. LoRA has rank {LORA_RANK} on every projection and a
learning rate of {LORA_RATE:g}; the full fine-tune's is {FULL_RATE:g}. Both are the recommended ones
(`task.choices`). With 1e-4 the full fine-tune kept 16 of 24 general answers.

| {" | ".join(head)} |
|{"---|" * len(head)}
{rows}

Predicted seconds are `plan.step()` after `ss.calibrate()` on the same machine; measured seconds are the
median of all steps after the first {FIRST_STEPS}. Measured minutes include start-up and export. Memory is the
peak of tensors on the rank with the most. {versions}

## Answers

{_write_examples(base, outcomes)}
"""


def _write_examples(base: Answers, outcomes: Sequence[Outcome]) -> str:
    tuned = outcomes[0]
    lines = [f"| question | base | {tuned.fine_tune.name} |", "|---|---|---|"]
    for index in EXAMPLES:
        lines.append(_write_example(HELD_OUT[index], base.held_out[index], tuned.answers.held_out[index]))
    lines.append(_write_example(GENERAL[0], base.general[0], tuned.answers.general[0]))
    return "\n".join(lines)


def _write_example(question: Question, base: str, tuned: str) -> str:
    cells = (question.question, base, tuned)
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"
