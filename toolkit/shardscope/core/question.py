"""``Question``: what a finding asks of a person, for nobody else can know it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


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
