"""DeepSpeed over the process group that a run has brought up, as often as one process asks for it.

DeepSpeed keeps its groups in modules and makes them once. An engine that is set up anew, after a checkpoint
or in another world, has to find them as they were at import.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch.distributed as dist

_GROUPS_IN_SMALL = ("mpu", "mesh_device", "expert_tensor_parallel_world_size")
"""What ``deepspeed.utils.groups`` keeps between engines under names that are no constants'."""
_pristine: dict[str, Any] = {}


def connect(deepspeed: Any, backend: str, rank: int) -> None:
    """Let DeepSpeed take torch's process group as its world; groups of an earlier one are forgotten."""
    # It asks for these even where the group is up; torch's launcher says all of them.
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", dist.get_world_size())):
        os.environ.setdefault(name, str(value))
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    if not _pristine:
        names = (name for name in vars(groups) if name.isupper() or name in _GROUPS_IN_SMALL)
        _pristine.update({name: _copied(getattr(groups, name)) for name in names})
    for name, value in _pristine.items():
        setattr(groups, name, _copied(value))
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    comm.cdb = None
    # Its reductions through shared memory would be compiled, and are for one world in a process's life.
    backends: Any = importlib.import_module("deepspeed.comm.torch")
    backends.build_shm_op = _nothing
    deepspeed.init_distributed(backend)


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _nothing() -> None:
    return None
