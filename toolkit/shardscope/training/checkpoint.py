"""Checkpoints of DDP and FSDP2 in one format: torch.distributed.checkpoint, under the model's own names.

Both engines write the same keys, so what DDP saved FSDP2 loads, over any number of ranks. The metadata of the
format is a pickle: checkpoints are opened only where this user's own run wrote them.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

POSITION_FILE = "position.json"


def save(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    position: dict[str, Any],
    only_trained: bool,
) -> None:
    """Write ``path`` (a folder), all ranks together; ``position`` goes in as readable JSON.

    ``only_trained`` leaves frozen weights out: adapters are megabytes, the model under them is not ours to
    copy.
    """
    aside = path.with_name(f".{path.name}.partial")
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
    dist.barrier()
    dcp.save(_state(model, optimizer, only_trained), checkpoint_id=str(aside))
    if dist.get_rank() == 0:
        (aside / POSITION_FILE).write_text(json.dumps(position), encoding="utf-8")
        _replace(aside, path)
    # Nobody returns before the name exists, so a rank that fails next cannot tear down an unfinished rename.
    dist.barrier()


def load(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, only_trained: bool
) -> dict[str, Any]:
    """Read ``path`` into ``model`` and ``optimizer``; return its position.

    Raises ``FileNotFoundError`` if it is no checkpoint, ``PermissionError`` if another user owns it.
    """
    if not (path / POSITION_FILE).is_file():
        raise FileNotFoundError(f"{path} is not a whole checkpoint: it has no {POSITION_FILE}")
    for part in (path, *path.iterdir()):
        if part.stat().st_uid != os.getuid():
            raise PermissionError(f"{part} is another user's; the format pickles, so it is not opened")
    state = _state(model, optimizer, only_trained)
    dcp.load(state, checkpoint_id=str(path))
    options = StateDictOptions(strict=not only_trained, ignore_frozen_params=only_trained)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    position: dict[str, Any] = json.loads((path / POSITION_FILE).read_text(encoding="utf-8"))
    return position


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, only_trained: bool) -> dict[str, Any]:
    options = StateDictOptions(ignore_frozen_params=only_trained)
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def _replace(aside: Path, path: Path) -> None:
    """Put ``aside`` where ``path`` is; a folder cannot be renamed onto a full one, so that one goes first."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    aside.rename(path)
    shutil.rmtree(old, ignore_errors=True)
