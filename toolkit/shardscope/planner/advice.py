"""What advice is: the plan, the questions on the way to it, and what else there was."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One question, and what this model on these GPUs answers to it."""

    question: str
    """``Does everything fit on one GPU?``"""
    answer: str
    """``No`` or ``Yes`` first where it is such a question, then what follows from it."""
    number: str
    """The figures behind the answer, with their units; empty where the question was not asked."""
    why: str
    """One or two sentences: what the question is for, and what the answer costs or saves."""
    taken: bool
    """Whether the plan has what the question is about. The last turn taken decided the framework."""
    plan: Plan | None = None
    """The plan that the figures are of; None where the question is about no single one."""

    def __str__(self) -> str:
        mark = "->" if self.taken else "  "
        number = f" [{self.number}]" if self.number else ""
        return f"{mark} {self.question} {self.answer}{number}\n      {self.why}"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Which plan to start with, why, and what else there is; made by ``ss.recommend``."""

    plan: Plan | None
    """The simplest plan that does the work; None where nothing fits, and then :attr:`alternatives` holds the
    nearest misses and what would do instead."""
    path: tuple[Turn, ...]
    """The questions in the order in which they were asked."""
    alternatives: tuple[tuple[Plan, str], ...]
    """Other plans, each with a sentence: what it gives and what it costs, or what it lacks."""
    why: str
    """The advice in a few sentences."""
    disagreement: str | None
    """Where a search over all layouts finds a faster plan than these questions: which, and by how much. None
    where both agree, or where no time can be told."""

    def __str__(self) -> str:
        parts = [self.why, "\n".join(map(str, self.path))]
        if self.disagreement:
            parts.append(f"Where the search disagrees: {self.disagreement}")
        if self.alternatives:
            parts.append("\n".join(["Otherwise:", *(f" - {words}" for _, words in self.alternatives)]))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        """The same as a plain table, without scripts."""
        rows = "".join(
            f"<tr{' style=font-weight:bold' if turn.taken else ''}><th scope='row' style='text-align:left'>"
            f"{escape(turn.question)}</th><td style='text-align:left'>{escape(turn.answer)}</td>"
            f"<td style='text-align:left'>{escape(turn.number)}</td></tr>"
            for turn in self.path
        )
        otherwise = "".join(f"<li>{escape(words)}</li>" for _, words in self.alternatives)
        disagrees = f"<p>{escape(self.disagreement)}</p>" if self.disagreement else ""
        return (
            f"<p>{escape(self.why)}</p><table><thead><tr><th>question</th><th>answer</th><th>number</th></tr>"
            f"</thead><tbody>{rows}</tbody></table>{disagrees}<ul>{otherwise}</ul>"
        )
