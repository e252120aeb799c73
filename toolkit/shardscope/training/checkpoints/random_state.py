"""Random number generator states of this rank in a checkpoint, as JSON instead of pickles."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist


def write(folder: Path) -> None:
    """Write this rank's states into ``folder``, one file per rank."""
    numbers: Any = numpy.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = numbers
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "world_size": dist.get_world_size(),
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": _text(torch.get_rng_state()),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = _text(torch.cuda.get_rng_state())
    _file(folder).write_text(json.dumps(states), encoding="utf-8")


def restore(folder: Path) -> bool:
    """Restore this rank's generators. Return whether there were states to restore.

    With another number of ranks the generators are unchanged: states of one rank must not go to another.
    """
    file = _file(folder)
    states: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if states.get("world_size") != dist.get_world_size():
        return False
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = states["numpy"]
    numpy.random.set_state((kind, numpy.asarray(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(_tensor(states["torch"]))
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(_tensor(states["cuda"]))
    return True


def _file(folder: Path) -> Path:
    return folder / f"random-rank-{dist.get_rank()}.json"


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
