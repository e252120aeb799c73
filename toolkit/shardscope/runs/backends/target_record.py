"""The target of a launch in ``run.json``, from which a run is resumed on the same target.

Setup lines and the like are code that a resumed run executes, and anyone who can write to the folder of runs
could change them. So the record is signed with the key that signs this user's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from shardscope.runs.backends.ray.target import Ray
from shardscope.runs.backends.slurm import Slurm
from shardscope.training.checkpoints.manifest import UnsignedError, is_record_signed, sign_record

SCHEDULERS: dict[str, type[Slurm | Ray]] = {"slurm": Slurm, "ray": Ray}


class UnknownTargetError(Exception):
    """The target of a run is not known. The message is a clause."""


def record_target(target: Slurm | Ray, created: object) -> dict[str, object]:
    """Return the record of a target; ``created`` is the time of the launch in ``run.json``.

    Without ``env_vars`` of a runtime environment, which may contain secrets of any form.
    """
    values = {field.name: getattr(target, field.name) for field in fields(target)}
    plain = {name: _to_plain(value) for name, value in values.items() if value not in (None, (), {})}
    environment = plain.get("runtime_env")
    if isinstance(environment, dict) and "env_vars" in environment:
        plain["runtime_env"] = {name: value for name, value in environment.items() if name != "env_vars"}
        plain["lacks"] = "the env_vars of its runtime_env"
    record: dict[str, object] = {"fields": plain}
    try:
        record["hmac"] = sign_record({"created": created, "fields": plain})
    except UnsignedError as error:
        record["unsigned"] = str(error)
    return record


def restore_target(description: Mapping[str, object]) -> Slurm | Ray | None:
    """Return the target in ``description``, which is ``run.json``; None for a run of this machine.

    Raises ``UnknownTargetError``, ``ValueError`` for a wrong field.
    """
    scheduler, record = description.get("scheduler"), description.get("on")
    kind = SCHEDULERS.get(scheduler) if isinstance(scheduler, str) else None
    if kind is None:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("fields"), dict):
        raise UnknownTargetError("the run folder does not keep the options of its job")
    if "unsigned" in record:
        raise UnknownTargetError(f"the options of its job could not be signed: {record['unsigned']}")
    values = record["fields"]
    try:
        signed = {"created": description.get("created"), "fields": values}
        is_ours = is_record_signed(signed, record.get("hmac"))
    except UnsignedError as error:
        raise UnknownTargetError(f"the options of its job cannot be checked: {error}") from None
    if not is_ours:
        raise UnknownTargetError("the options of its job in run.json are not those of a launch of yours")
    if "lacks" in values:
        raise UnknownTargetError(f"the run folder does not keep {values['lacks']}")
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})


def _to_plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
