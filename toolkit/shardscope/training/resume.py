"""What a run may go on from: refused in words before any rank starts, where that is known. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.planner.preflight.case import Case
from shardscope.planner.preflight.checkpoints import resumed
from shardscope.validation import refuse

if TYPE_CHECKING:
    from shardscope.plan import Plan


@dataclass(frozen=True, kw_only=True)
class _GoingOn:
    resume_from: Path


def check_loads(checkpoint: Path, plan: Plan, field: str) -> None:
    """Raise ``ValueError``, naming ``field``, if a run's ``checkpoint`` does not load under ``plan``.

    Another model, another framework's format, or other ranks where the format is tied to them: what the
    preflight calls a danger of a resumed run.
    """
    for finding in resumed(Case(plan=plan, task=_GoingOn(resume_from=checkpoint))):
        if finding.severity == "danger":
            allowed = f"a checkpoint that this plan loads. {finding.why.rstrip('.')}"
            refuse(field, str(checkpoint), allowed, finding.change)
