"""Random number generator states of this rank in a checkpoint, as JSON instead of pickles."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy
import torch
import torch.distributed as dist


class _States(TypedDict):
    """The states in a file; tuples are lists in JSON."""

    world_size: int
    python: tuple[int, list[int], float | None]
    """Version, state and cached normal number, as in ``random.getstate()``."""
    numpy: tuple[str, list[int], int, int, float]
    """As in ``numpy.random.get_state()``, with the keys as a list."""
    torch: str
    """Bytes of torch's CPU state, in base64."""
    cuda: NotRequired[str]


def write_states(folder: Path) -> None:
    """Write this rank's states into ``folder``, one file per rank."""
    # The legacy form is a tuple, whose parts are plain values but for the array of keys.
    numpy_state = numpy.random.get_state(legacy=True)
    assert isinstance(numpy_state, tuple)
    kind, keys, position, has_gauss, cached = numpy_state
    version, python_state, gauss = random.getstate()
    states: _States = {
        "world_size": dist.get_world_size(),
        "python": (version, list(python_state), gauss),
        "numpy": (kind, keys.tolist(), position, has_gauss, cached),
        "torch": _encode_state(torch.get_rng_state()),
    }
    # Reading the state of a GPU that the run does not use would initialize CUDA.
    if torch.cuda.is_initialized():
        states["cuda"] = _encode_state(torch.cuda.get_rng_state())
    _state_file(folder).write_text(json.dumps(states), encoding="utf-8")


def restore_states(folder: Path) -> bool:
    """Restore this rank's generators. Return whether there were states to restore.

    With another number of ranks the generators are unchanged: states of one rank must not go to another.
    """
    file = _state_file(folder)
    if not file.is_file():
        return False
    states: _States = json.loads(file.read_text(encoding="utf-8"))
    if states.get("world_size") != dist.get_world_size():
        return False
    # JSON made lists of tuples and of the array, and the setters accept no lists.
    version, python_state, gauss = states["python"]
    random.setstate((version, tuple(python_state), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    numpy_keys = numpy.asarray(keys, dtype=numpy.uint32)
    numpy.random.set_state((kind, numpy_keys, position, has_gauss, cached))
    torch.set_rng_state(_decode_state(states["torch"]))
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(_decode_state(states["cuda"]))
    return True


def _state_file(folder: Path) -> Path:
    return folder / f"random-rank-{dist.get_rank()}.json"


def _encode_state(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode("ascii")


def _decode_state(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
