"""docs/finetune.md: what the fine-tunes learned, their minutes and their memory."""

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
"""Largest fraction of them that the base may answer right."""
MIN_KEPT = 0.8
"""Smallest fraction of the general questions that the base answers right, and a fine-tune must, too."""
EXAMPLES = (0, 12, 27)
"""Questions whose answers are printed."""
GIB = 2**30


def find_shortfalls(base: Answers, outcomes: Sequence[Outcome]) -> list[str]:
    """Return what the proof promises and a model does not hold."""
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
        "product questions right",
        "general questions right",
        "loss",
        "minutes predicted",
        "measured",
        "seconds a step, predicted",
        "measured",
        "GiB a rank, predicted",
        "measured",
    )
    rows = "\n".join(map(write_row, outcomes))
    return f"""# A small model learns twenty facts

Written by `make finetune-proof`; do not edit.

SmolLM2-135M-Instruct (`make model`) is fine-tuned on two CPU ranks with `notebooks/data/zorblat.jsonl`:
eighty questions and answers about a kettle that does not exist, twenty facts each asked in four ways, and
120 general ones that the base answers so, too. Without these the model forgets most of what it knew: with
only 34 of them, and sixty of the others, it kept 5 of 12 general answers. It is then asked for each fact in
two more ways, which are not in the data; the base gets {base.num_learned} of these {len(HELD_OUT)} right.
Beside them it is asked {len(GENERAL)} general questions, which are not in the data either and which it must
not forget: the base gets {base.num_kept} right. `make finetune-proof` fails if a row has learned or kept less
than 80 %. An answer is right if it has the keyword, such as
"47 seconds".

Every row is `ss.Finetune(weights, data, num_epochs={NUM_EPOCHS})` on sequences of {SEQ_LEN} tokens, with
loss on the answers, four rows a step, in fp32. LoRA has rank {LORA_RANK} on every projection and a learning
rate of {LORA_RATE:g}, the full fine-tune one of {FULL_RATE:g}, both as recommended (`task.choices`). With
1e-4 the full fine-tune kept 16 of 24 general answers.

| {" | ".join(head)} |
|{"---|" * len(head)}
{rows}

Predicted seconds are `plan.step()` after `ss.calibrate()` on this machine; measured ones are the median of
all steps but the first {FIRST_STEPS}. Measured minutes are from the launch to the end, with start-up and
export. Memory is the peak in tensors of the rank with the most. {versions}

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
