"""The checkpoint from which a task resumes: found and checked before any rank starts. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import Value, refuse
from shardscope.machine.user_folders import expand_home
from shardscope.planner.checks.case import Case
from shardscope.planner.checks.checkpoints import check_resumed_checkpoint
from shardscope.training.checkpoints.choice import find_checkpoint
from shardscope.training.checkpoints.folders import list_resumable
from shardscope.training.checkpoints.manifest import find_damage

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

DEFAULT_FOLDER = "runs"
"""Default parent of run folders in ``launch``."""


def find_resumable(field: str, value: object) -> Path:
    """Return the absolute run or checkpoint folder named by ``value``.

    Raises ``ValueError`` naming ``field`` if it has no complete checkpoint.
    """
    named = getattr(value, "folder", value)
    if not isinstance(named, str | Path):
        refuse(field, value, "True, False, or the path of a run or of a checkpoint", Value(True))
    # A path first, then a name in the folder where launch() makes runs.
    path = expand_home(named).absolute()
    candidates = (path, Path(DEFAULT_FOLDER, named).absolute())
    folder = next((folder for folder in candidates if find_checkpoint(folder) is not None), None)
    if folder is None:
        existing = next((candidate for candidate in candidates if candidate.is_dir()), None)
        problem = "there is no such folder"
        if existing is not None:
            problem = f"{'this folder' if existing == path else existing} has none"
        allowed = f"True, False, a complete checkpoint, or a run folder with one: {problem}"
        refuse(field, str(named), allowed, "resume=True, which starts at step 0 if there is none")
    return folder


@dataclass(frozen=True, kw_only=True)
class _ResumingTask:
    resume_from: Path
    seed: int
    frozen_base: Mapping[str, object] | None


def check_loads(
    checkpoint: Path, plan: Plan, field: str, *, seed: int, frozen_base: Mapping[str, object] | None
) -> list[str]:
    """Raise ``ValueError`` naming ``field`` if ``checkpoint`` cannot be loaded under ``plan``.

    Causes are a damaged file, and another model, another framework's format, a different number of ranks if
    the format depends on it, or adapters of another base: the preflight findings of severity "danger" for a
    resumed run. Return its warnings as text. ``seed`` and ``frozen_base`` are those of the resuming task.
    """
    if (damage := find_damage(checkpoint)) is not None:
        intact = [path for path in list_resumable(checkpoint.parent.parent) if find_damage(path) is None]
        fix = f"resume={str(intact[-1])!r}" if intact else "another checkpoint, or resume=False"
        refuse(field, str(checkpoint), f"a checkpoint with all of its files: {damage}", fix)
    # The checks of the preflight, on the three facts that they read of a task.
    task = _ResumingTask(resume_from=checkpoint, seed=seed, frozen_base=frozen_base)
    findings = list(check_resumed_checkpoint(Case(plan=plan, task=task)))
    for finding in findings:
        if finding.severity == "danger":
            allowed = f"a checkpoint that this plan loads. {finding.why.rstrip('.')}"
            refuse(field, str(checkpoint), allowed, finding.change)
    return [f"{finding.why} Nearest fix: {finding.change}." for finding in findings]
