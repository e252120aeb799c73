"""Where Megatron's own random number generators stand, as JSON in a checkpoint: nothing is pickled.

Beside the device's generator it has one for what tensor-parallel ranks draw apart, and one for experts.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def write(folder: Path) -> None:
    """Write this rank's states into ``folder``; every rank has a file of its own."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {
        name: base64.b64encode(state.numpy().tobytes()).decode("ascii")
        for name, state in get_cuda_rng_tracker().get_states().items()
    }
    _file(folder).write_text(json.dumps({"degrees": _degrees(), "states": states}), encoding="utf-8")


def restore(folder: Path) -> bool:
    """Put this rank's generators where :func:`write` found them; whether it did.

    Over other degrees they stay as they are: no rank's numbers are another's.
    """
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    file = _file(folder)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if found.get("degrees") != _degrees():
        return False
    states = {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        for name, text in found["states"].items()
    }
    get_cuda_rng_tracker().set_states(states)
    return True


def _degrees() -> list[int]:
    from megatron.core import parallel_state

    return [
        dist.get_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
    ]


def _file(folder: Path) -> Path:
    return folder / f"megatron-random-rank-{dist.get_rank()}.json"
