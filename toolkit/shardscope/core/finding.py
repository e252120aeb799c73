"""``Finding``: one thing about a plan, a task or a script that runs, but badly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

Severity = Literal["danger", "warning", "hint"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The worst first: what spoils the run or its result, what wastes much of it, what is good to know."""


class Way(NamedTuple):
    """A plan that fits, or on the way to one, and what makes it of the one that does not."""

    changes: tuple[str, ...]
    plan: Plan
    seconds_lost: float = 0.0
    """Of an optimizer step; NaN where that is not known."""

    @property
    def words(self) -> str:
        """``recompute none → selective, optimizer adamw → adamw_8bit``."""
        return ", ".join(self.changes)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One result of the preflight. What cannot run at all is no finding: the Plan refuses it."""

    name: str
    """What was found, in kebab-case; a name is found at most once for one plan, task or line of a script."""
    severity: Severity
    """How bad it is."""
    why: str
    """One or two sentences, with the number behind it."""
    number: float | None
    """That number by itself, in the unit of :attr:`why`; None where a pattern was found, no size."""
    change: str
    """What mends it, in words."""
    plan: Plan | None = None
    """The mended plan; None where the change is one of a task, a script or the machine."""
    task: object = None
    """The mended task (``Pretrain(...)`` with another field); None where the change is none of its fields."""
    question: Question | None = None
    """What only a person knows, and what a plan is with the answer; None: nothing is asked."""
    way: Callable[[], Way | None] | None = field(default=None, repr=False, compare=False)
    """Looks for several changes that mend it together, or for another plan: up to seconds, for which nobody
    waits who does not ask. None: there is nothing to look for."""
    line: int | None = None
    """The line of the script that it is about, from 1; None: about no script."""

    def look(self) -> Finding:
        """The finding with the plan that :attr:`way` finds and what it changes; without one, that none was
        found."""
        if self.way is None:
            return self
        found = self.way()
        if found is None:
            return replace(self, way=None, change=f"{self.change}: none was found")
        return replace(self, way=None, change=found.words, plan=found.plan)


# ---- ``Question``: what a finding asks of a person, for nobody else can know it


@dataclass(frozen=True, kw_only=True)
class Question:
    """How much of something a node has."""

    plan: Plan
    """The plan that it is asked of."""
    field: str
    """Of its cluster: ``host_memory_bytes`` or ``nvme_bytes``."""

    def answered(self, num_bytes: int) -> Plan:
        """The plan on nodes that have ``num_bytes``. Raises ``ValueError`` where no node can."""
        told: dict[str, Any] = {self.field: num_bytes}
        return replace(self.plan, cluster=replace(self.plan.cluster, **told))
