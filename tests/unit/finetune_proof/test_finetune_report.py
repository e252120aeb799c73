"""The proof of fine-tuning: its questions are not in its data, and its report names claims that do not
hold."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.finetune_proof.fine_tunes import FINE_TUNES, Outcome
from tests.finetune_proof.questions import DATA, GENERAL, HELD_OUT, Answers, Question
from tests.finetune_proof.report import find_shortfalls, write_document, write_row


def make_answers(num_learned: int, num_kept: int) -> Answers:
    """Return answers of which the first ones are right."""

    def answer(questions: list[Question], num_right: int) -> list[str]:
        return [
            f"It is {question.keywords[0].upper()}, I think." if index < num_right else "I do not know."
            for index, question in enumerate(questions)
        ]

    return Answers(answer(HELD_OUT, num_learned), answer(GENERAL, num_kept))


BASE = make_answers(1, len(GENERAL))
OUTCOMES = [
    Outcome(
        fine_tune=fine_tune,
        answers=make_answers(36, len(GENERAL) - 1),
        num_steps=120,
        first_loss=3.0,
        last_loss=0.05,
        train_seconds=150.0,
        step_seconds=1.0,
        predicted_step_seconds=0.5,
        peak_bytes=3 * 2**30,
        predicted_peak_bytes=2 * 2**30,
    )
    for fine_tune in FINE_TUNES
]


def test_no_question_is_in_the_data() -> None:
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    trained = {row["question"].lower() for row in rows}
    assert len(trained) == len(rows), "each question once"
    asked = [question.question.lower() for question in (*HELD_OUT, *GENERAL)]
    assert len(set(asked)) == len(asked) and not trained.intersection(asked)


def test_right_answers_are_counted_by_keyword() -> None:
    assert (BASE.num_learned, BASE.num_kept) == (1, len(GENERAL))
    assert make_answers(0, 0).num_learned == 0


@pytest.mark.parametrize(
    ("base", "tuned", "shortfall"),
    [
        (BASE, make_answers(36, len(GENERAL) - 1), None),
        (BASE, make_answers(31, len(GENERAL)), "31 of 40 questions"),
        (BASE, make_answers(40, round(0.7 * len(GENERAL))), "general answers are left"),
        (make_answers(5, len(GENERAL)), make_answers(40, len(GENERAL)), "the base answers 5"),
    ],
)
def test_what_does_not_hold_is_reported(base: Answers, tuned: Answers, shortfall: str | None) -> None:
    shortfalls = find_shortfalls(base, [replace(OUTCOMES[0], answers=tuned)])
    assert [shortfall in text for text in shortfalls] == ([True] if shortfall else [])


def test_the_document_has_a_row_for_each_fine_tune_and_its_answers() -> None:
    text = write_document(BASE, OUTCOMES, "torch 2.13.0.")
    for outcome in OUTCOMES:
        assert write_row(outcome) in text
    row = write_row(OUTCOMES[0])
    assert "36 of 40" in row and "| 1.0 | 2.5 | 0.50 | 1.00 | 2.00 | 3.00 |" in row
    assert "I do not know." in text and "torch 2.13.0." in text
