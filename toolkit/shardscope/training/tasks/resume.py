"""What a run may go on from: refused in words before any rank starts, where that is known. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.core.errors import refuse
from shardscope.planner.checks.case import Case
from shardscope.planner.checks.checkpoints import resumed

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


@dataclass(frozen=True, kw_only=True)
class _GoingOn:
    resume_from: Path
    seed: int
    frozen_base: Mapping[str, Any] | None


def check_loads(
    checkpoint: Path, plan: Plan, field: str, *, seed: int, frozen_base: Mapping[str, Any] | None
) -> list[str]:
    """Raise ``ValueError``, naming ``field``, if a run's ``checkpoint`` does not load under ``plan``.

    Another model, another framework's format, other ranks where the format is tied to them, or adapters over
    another base: what the preflight calls a danger of a resumed run. What it only warns of comes back in
    words. ``seed`` and ``frozen_base`` are the task's that would go on.
    """
    going_on = _GoingOn(resume_from=checkpoint, seed=seed, frozen_base=frozen_base)
    found = list(resumed(Case(plan=plan, task=going_on)))
    for finding in found:
        if finding.severity == "danger":
            allowed = f"a checkpoint that this plan loads. {finding.why.rstrip('.')}"
            refuse(field, str(checkpoint), allowed, finding.change)
    return [f"{finding.why} Nearest fix: {finding.change}." for finding in found]
