"""States of Megatron's random number generators in a checkpoint, as JSON: nothing is pickled.

In addition to the device's generator, Megatron has one that differs between tensor-parallel ranks, and one
for experts.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import torch
import torch.distributed as dist


def write_states(folder: Path) -> None:
    """Write this rank's generator states to its own file in ``folder``."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {
        name: base64.b64encode(state.numpy().tobytes()).decode("ascii")
        for name, state in get_cuda_rng_tracker().get_states().items()
    }
    _state_file(folder).write_text(
        json.dumps({"degrees": _read_degrees(), "states": states}), encoding="utf-8"
    )


def restore_states(folder: Path) -> bool:
    """Restore the generator states that :func:`write_states` saved, and return whether they were restored.

    With other degrees they stay unchanged, because the saved states belong to other shards.
    """
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    file = _state_file(folder)
    if not file.is_file():
        return False
    saved = json.loads(file.read_text(encoding="utf-8"))
    if saved.get("degrees") != _read_degrees():
        return False
    # A bytearray, because torch.frombuffer warns of read-only memory.
    states = {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        for name, text in saved["states"].items()
    }
    get_cuda_rng_tracker().set_states(states)
    return True


def _read_degrees() -> list[int]:
    from megatron.core import parallel_state

    return [
        dist.get_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
    ]


def _state_file(folder: Path) -> Path:
    return folder / f"megatron-random-rank-{dist.get_rank()}.json"
