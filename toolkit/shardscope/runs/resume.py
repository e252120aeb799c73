"""Resuming of a run that ended early: its task is launched again from its newest complete checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.errors import refuse, warn_user
from shardscope.core.number_format import format_count
from shardscope.records.folder import FINAL
from shardscope.records.json_files import read_json
from shardscope.runs.backends.next_attempt import get_retries
from shardscope.runs.backends.target_record import UnknownTargetError, restore_target
from shardscope.runs.task_fields import find_builtin_task, read_description
from shardscope.training.checkpoints.choice import choose_for_resume
from shardscope.training.checkpoints.folders import POSITION_FILE

if TYPE_CHECKING:
    from shardscope.runs.backends.ray.target import Ray
    from shardscope.runs.backends.slurm import Slurm
    from shardscope.runs.run import Run
    from shardscope.training.tasks.text_task import TextTask

PATH_FIELDS = frozenset({"text", "data", "validation", "weights", "resume"})
"""Fields of tasks that ``run.json`` keeps as text and a task takes as a path."""


EXAMPLE_FIELDS = {
    "columns": None,
    "loss_on": "completions",
    "bad_rows": "refuse",
    "num_epochs": None,
    "validation": None,
    "validate_every": None,
    "early_stopping": None,
}
"""Fields that a plain text does not use, and that runs of older versions have not recorded."""
NEWER_FIELDS = {
    "report_to": ["tensorboard"],
    "samples": [],
    "sample_every": None,
    "max_new_tokens": 64,
    "streaming": False,
    "objective": "sft",
    "dpo_beta": 0.1,
}
"""Fields that runs of older versions have not recorded, with the value that stands for what they did."""


def _find_schedule(recorded: Mapping[str, object]) -> dict[str, object]:
    """Return the schedule of a task that a version before 0.2 recorded, by its present fields.

    The default was a cosine to a tenth of the peak after a tenth of the steps, at most 100.
    """
    if "schedule" in recorded:
        return {}
    num_steps, warmup = recorded.get("num_steps"), recorded.get("warmup_steps")
    default = min(100, num_steps // 10) if isinstance(num_steps, int) else 0.1
    return {
        "schedule": recorded.get("lr_scheduler_type") or "cosine_with_min_lr",
        "warmup": default if warmup is None else warmup,
    }


def resume_run(run: Run, *, outlive_kernel: bool | None = None, force: bool = False) -> Run:
    """Launch a run that continues ``run`` from its newest complete checkpoint, and return it.

    Plan, task and the total number of steps stay the same, so the new run trains the remaining steps, on the
    same target with the same options and ``retries``. It gets its own folder in the same parent. Only
    checkpoints saved by this user's own launches are used, with a warning if there are newer ones.
    ``outlive_kernel=None`` keeps the choice of the first launch; ``force`` launches despite too little free
    GPU memory, as in :func:`shardscope.launch`.

    Raises ``ValueError`` with the reason if the run cannot be resumed.
    """
    from shardscope.runs.launch.launch import launch

    description = read_description(run)
    try:
        task, notice = _build_resuming_task(run, description)
        target = _restore_target(description)
    except _CannotResumeError as error:
        refuse("resume_run run", run.name, f"a run that can be resumed; {error.reason}", error.fix)
    if notice:
        warn_user(f"{run.name}: {notice}")
    name = description.get("asked_name")
    if outlive_kernel is None:
        outlive_kernel = description.get("outlive_kernel") is True
    return launch(
        run.plan,
        task,
        name=name if isinstance(name, str) else None,
        outlive_kernel=outlive_kernel,
        folder=run.folder.parent,
        force=force,
        on=target,
        retries=get_retries(description),
    )


def why_not_resumable(run: Run) -> str | None:
    """Return why :func:`resume_run` would raise for ``run``, as one sentence, or None if it would launch.

    The hardware that the plan needs is checked only at the launch.
    """
    description = read_description(run)
    try:
        _build_resuming_task(run, description)
        _restore_target(description)
    except _CannotResumeError as error:
        return f"{error.reason[:1].upper()}{error.reason[1:]}: {error.fix}."
    except ValueError as error:
        return str(error)
    return None


class _CannotResumeError(Exception):
    """Error with a ``reason`` (a clause without a period) and a suggested ``fix``."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix


def _restore_target(description: Mapping[str, object]) -> Slurm | Ray | None:
    try:
        return restore_target(description)
    except UnknownTargetError as error:
        fix = "launch again with on= and resume= for its checkpoint"
        raise _CannotResumeError(str(error), fix) from None


def _build_resuming_task(run: Run, description: Mapping[str, object]) -> tuple[TextTask, str]:
    """Return the task of ``run`` with its newest checkpoint as ``resume``, and a notice of skipped ones."""
    if run.status not in FINAL:
        raise _CannotResumeError(f"the run is {run.status}", "stop it first")
    if run.status == "finished":
        raise _CannotResumeError("the run has finished", "launch a task with resume= and a larger num_steps")
    # Check the task first: the user's own function cannot be resumed, with or without a checkpoint.
    kind = _find_task_class(description)
    # A checkpoint that another user saved may run code when it is loaded, so it is only named.
    choice = choose_for_resume(run.folder, description)
    checkpoint = choice.checkpoint
    if checkpoint is None and choice.skipped:
        unsigned, newest = choice.loadable, choice.skipped[0]
        if unsigned is None:
            raise _CannotResumeError(
                f"its checkpoint is damaged ({newest.path.name}: {newest.why})",
                "launch it again, or copy that file there again",
            )
        raise _CannotResumeError(
            "your own launches on this machine saved no checkpoint of it "
            f"({unsigned.path.name}: {unsigned.why})",
            f"if you trust it, launch a task with resume={str(unsigned.path)!r}",
        )
    if checkpoint is None:
        raise _CannotResumeError("the run saved no complete checkpoint", "launch it again")
    done = (read_json(checkpoint / POSITION_FILE) or {}).get("num_steps_done")
    # A run that failed after its last step has still to export its weights.
    has_to_export = (run.task_fields or {}).get("export") is True and run.model is None
    if run.num_steps is not None and isinstance(done, int) and done >= run.num_steps and not has_to_export:
        raise _CannotResumeError(
            f"all of its {format_count(run.num_steps, 'step')} are done",
            "launch a task with resume= and a larger num_steps",
        )
    return _make_task(kind, description, checkpoint), choice.notice


def _find_task_class(description: Mapping[str, object]) -> type[TextTask]:
    """Return the class of the run's task if it is a built-in one; raise ``_CannotResumeError`` otherwise."""
    from shardscope.training.tasks.finetune import Finetune
    from shardscope.training.tasks.pretrain import Pretrain

    name = find_builtin_task(description)
    for kind in (Pretrain, Finetune):
        if name == kind.__name__:
            return kind
    raise _CannotResumeError(
        "the task is your own code, which a run folder does not keep", "launch it again from your notebook"
    )


def _make_task(kind: type[TextTask], description: Mapping[str, object], checkpoint: Path) -> TextTask:
    """Return a task with the fields recorded in ``run.json`` that resumes from ``checkpoint``.

    Raise ``_CannotResumeError`` if a field is missing (``record_task_fields`` leaves out text, and older
    versions had fewer fields): resuming with its default value might silently train something else.
    """
    recorded = description.get("asked")
    if not isinstance(recorded, dict):
        recorded = {}
    elif recorded:
        recorded = {**NEWER_FIELDS, **recorded}
        recorded.update(_find_schedule(recorded))
    if kind.__name__ == "Finetune" and "data" not in recorded and "text" in recorded:
        # Versions before 0.2 read one text file, by the field "text".
        recorded = {**EXAMPLE_FIELDS, **recorded, "data": recorded["text"]}
    names = [field.name for field in fields(kind)]
    missing = [name for name in names if name not in recorded]
    if missing:
        raise _CannotResumeError(
            f"the run folder does not keep {', '.join(missing)} of its task", "launch it again with resume="
        )
    # The constructor checks each value, so a damaged run.json raises ValueError there.
    arguments = {name: recorded[name] for name in names}
    for name in PATH_FIELDS:
        # A data set's name on the Hub stays text; a path is recorded as an absolute one.
        if isinstance(arguments.get(name), str) and Path(arguments[name]).is_absolute():
            arguments[name] = Path(arguments[name])
    arguments["resume"] = checkpoint
    return kind(**arguments)
