"""``position.json`` of a checkpoint: its number of steps, and the settings that a resumed run must share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from shardscope.core.errors import refuse
from shardscope.frameworks.registry import frameworks
from shardscope.training.checkpoints.folders import POSITION_FILE
from shardscope.training.checkpoints.manifest import Ranges, UnsignedError, read_run, sign_checkpoint
from shardscope.training.checkpoints.temporary_folder import check_own

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.training.engine import Engine


class Position(TypedDict):
    """Fields of ``position.json``; those of one framework only, or newer than the format, may be missing."""

    num_steps_done: int
    framework: NotRequired[str]
    format: NotRequired[str]
    """Name of the checkpoint's format (``CheckpointFormat.name``), which several frameworks may read."""
    seed: NotRequired[int]
    world_size: NotRequired[int]
    frozen_base: NotRequired[dict[str, object]]
    """Identification of the base of adapters, see ``Engine.frozen_base``."""
    validation: NotRequired[dict[str, object]]
    """State of early stopping, see ``Engine.validation_state``."""
    stream: NotRequired[list[object]]
    """Positions in streamed data, see ``Engine.stream_positions``."""
    data_source: NotRequired[dict[str, object]]
    """Name and SHA-256 of the data, see ``Engine.data_source``."""
    optimizer: NotRequired[str]
    """Class of the optimizer (DDP and FSDP2)."""
    scaler: NotRequired[dict[str, object] | None]
    """State of the gradient scaler (DDP and FSDP2); None without one."""
    in_stages: NotRequired[bool]
    """Whether the ranks are pipeline stages (FSDP2)."""


def describe_position(engine: Engine) -> dict[str, object]:
    """Return the position fields that all frameworks' checkpoints have."""
    position: dict[str, object] = {
        "framework": engine.framework,
        "format": _get_format_name(engine.plan),
        "num_steps_done": engine.num_steps_done,
        "seed": engine.seed,
    }
    if engine.frozen_base is not None:
        position["frozen_base"] = dict(engine.frozen_base)
    if engine.validation_state is not None:
        position["validation"] = dict(engine.validation_state)
    if engine.stream_positions is not None:
        position["stream"] = list(engine.stream_positions)
    if engine.data_source is not None:
        position["data_source"] = dict(engine.data_source)
    return position


def write_position(
    folder: Path, position: Mapping[str, object], pickled: Mapping[str, Ranges] | None = None
) -> None:
    """Complete the checkpoint in ``folder``, which has all other files: sign it, then write its position.

    The position is written last, because its presence marks a complete checkpoint. ``pickled`` is that of
    :func:`sign_checkpoint`. A checkpoint that cannot be signed is saved without a manifest.
    """
    # The folder of the run is two levels up: <run>/checkpoints/<this checkpoint, or its temporary name>.
    content = json.dumps(position).encode()
    try:
        sign_checkpoint(folder, read_run(folder.parent.parent), pickled or {}, {POSITION_FILE: content})
    except UnsignedError as error:
        print(
            f"the checkpoint in {folder.parent} is not signed, so only its path resumes from it: {error}",
            flush=True,
        )
    (folder / POSITION_FILE).write_bytes(content)


def read_position(path: Path, plan: Plan) -> Position:
    """Return the position of the checkpoint at ``path``, which the engine of ``plan`` is about to load.

    Raises ``FileNotFoundError`` if the checkpoint is not complete, ``PermissionError`` if another user owns
    it, ``ValueError`` if it has another framework's format.
    """
    if not (path / POSITION_FILE).is_file():
        raise FileNotFoundError(f"{path} is not a complete checkpoint: it has no {POSITION_FILE}")
    check_own(path)
    position: Position = json.loads((path / POSITION_FILE).read_text(encoding="utf-8"))
    own_format = _get_format_name(plan)
    # Checkpoints of older versions have no "format": a wrong one fails when it is loaded.
    saved_format = position.get("format", own_format)
    if saved_format != own_format:
        saving_framework = frameworks.get(str(position.get("framework")))
        saved_by = saving_framework.title if saving_framework is not None else position.get("framework")
        refuse(
            "checkpoint",
            str(path),
            f"one of {own_format}, which {plan.layout.title} reads: this one was saved by {saved_by} as "
            f"{saved_format}",
            "the plan of the run that saved it, or a fine-tune of its export",
        )
    return position


def _get_format_name(plan: Plan) -> str:
    return frameworks[plan.layout.framework].defaults().get_checkpoint_format(plan).name
