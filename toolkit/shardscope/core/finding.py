"""``Finding``: one preflight result about a plan, task or script that runs, but badly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from shardscope.core.serialization import replace_fields

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

Severity = Literal["danger", "warning", "hint"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""Worst first: spoils the run or its result, wastes much of it, good to know."""


class PlanChange(NamedTuple):
    """Changes that turn a plan that does not fit into ``plan``, which fits or is an intermediate step."""

    changes: tuple[str, ...]
    plan: Plan
    seconds_lost: float = 0.0
    """Added seconds per optimizer step; NaN if unknown."""

    @property
    def text(self) -> str:
        """The changes as text: ``recompute none → selective, optimizer adamw → adamw_8bit``."""
        return ", ".join(self.changes)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One preflight result. Plans that cannot run at all raise ``ValueError`` in ``Plan`` instead."""

    name: str
    """Kebab-case identifier, unique for one plan, task or script line."""
    severity: Severity
    """Severity of the finding."""
    why: str
    """Explanation in one or two sentences, with the number behind it."""
    number: float | None
    """That number, in the unit of :attr:`why`; None for findings about a pattern, not a size."""
    change: str
    """Suggested fix as text."""
    plan: Plan | None = None
    """The fixed plan; None if the fix changes the task, the script or the machine."""
    task: object = None
    """The fixed task, such as a ``Pretrain`` with another field; None if no field of it changes."""
    question: Question | None = None
    """A question for the user, with the plan that each answer leads to; None if there is none."""
    search: Callable[[], PlanChange | None] | None = field(default=None, repr=False, compare=False)
    """Search for several changes that fix it together, or for another plan. It takes up to seconds, so it
    runs only in :meth:`run_search`. None: nothing to search for."""
    line: int | None = None
    """Line of the script, from 1; None if the finding is not about a script."""

    def __str__(self) -> str:
        return f"{self.severity}: {self.why} Change: {self.change}"

    def run_search(self) -> Finding:
        """Run :attr:`search` and return the finding with the plan and changes that it found, if any."""
        if self.search is None:
            return self
        fix = self.search()
        if fix is None:
            return replace(self, search=None, change=f"{self.change}: none was found")
        return replace(self, search=None, change=fix.text, plan=fix.plan)


# ---- ``Question``: a fact about the machines that only the user knows


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question for the user: how much host memory or NVMe space a node has."""

    plan: Plan
    """The plan that the question is about."""
    field: str
    """Field of its cluster: ``host_memory_bytes`` or ``nvme_bytes``."""

    def answer(self, num_bytes: int) -> Plan:
        """Return the plan on nodes with ``num_bytes``. Raises ``ValueError`` for an impossible size."""
        cluster = replace_fields(self.plan.cluster, {self.field: num_bytes})
        return replace(self.plan, cluster=cluster)
