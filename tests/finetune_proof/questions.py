"""Questions to a model before and after its fine-tune, each with keywords that a right answer has."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import shardscope as ss

DATA = Path(__file__).parents[2] / "notebooks" / "data" / "zorblat.jsonl"
"""Eighty questions with answers, twenty facts about an invented product, each asked in four ways, and
120 general ones, which the base answers in these words or in words that begin so."""
MAX_NEW_TOKENS = 40


@dataclass(frozen=True)
class Question:
    """A question; its answer is right if it has one of ``keywords``, in upper or lower case."""

    question: str
    keywords: tuple[str, ...]

    def is_answered_by(self, answer: str) -> bool:
        """Return whether ``answer`` is right."""
        return any(keyword.lower() in answer.lower() for keyword in self.keywords)


def read_questions(name: str) -> list[Question]:
    """Return the questions of a file beside this module."""
    lines = Path(__file__).with_name(f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [Question(record["question"], tuple(record["keywords"])) for record in map(json.loads, lines)]


HELD_OUT = read_questions("held_out")
"""Each fact asked in two more ways, which are not in :data:`DATA`."""
GENERAL = read_questions("general")
"""Questions that the base answers right, none of them about the product or in :data:`DATA`."""


@dataclass(frozen=True)
class Answers:
    """Answers of one model to all questions."""

    held_out: list[str]
    general: list[str]

    @property
    def num_learned(self) -> int:
        """Number of right answers about the product."""
        return _count_right(HELD_OUT, self.held_out)

    @property
    def num_kept(self) -> int:
        """Number of right answers to the general questions."""
        return _count_right(GENERAL, self.general)


def ask_all(run: ss.Run, *, base: bool = False) -> Answers:
    """Ask the trained model, or its base, every question in a conversation of its own, without sampling."""
    with run.chat(max_new_tokens=MAX_NEW_TOKENS, base=base) as chat:

        def ask(question: Question) -> str:
            chat.reset()
            return "".join(chat.send(question.question)).strip()

        return Answers([ask(question) for question in HELD_OUT], [ask(question) for question in GENERAL])


def _count_right(questions: list[Question], answers: list[str]) -> int:
    return sum(map(Question.is_answered_by, questions, answers))
