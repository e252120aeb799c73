"""What a run of ZeRO wants before its ranks fork: DeepSpeed imported once, its extensions loaded once."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardscope.frameworks.deepspeed import extensions

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def before_fork(plan: Plan, device_type: str) -> None:
    """Import DeepSpeed for the ranks' device, and load the extensions that the plan's offloading needs.

    The first load of each compiles, for a minute (Adam on the host) to four (files by libaio); all later runs
    of this user find it.
    """
    import_deepspeed(device_type)
    for name in needed_extensions(plan):
        extensions.load(name)


def import_deepspeed(device_type: str) -> Any:
    """``deepspeed``, quietly, with the accelerator that ranks of ``device_type`` have."""
    # Asked for, not found out: a rehearsal in this process may have said another.
    os.environ["DS_ACCELERATOR"] = device_type
    if device_type == "cuda":
        # A count by CUDA itself would leave forked ranks without it.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # torch 2.13 renames the collectives that DeepSpeed calls, and says so at every step.
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use `torch.distributed", append=True)
    deepspeed: Any = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def needed_extensions(plan: Plan) -> tuple[str, ...]:
    """DeepSpeed's names of what has to be compiled for ``plan``."""
    layout: Any = plan.layout
    found: tuple[str, ...] = ()
    if layout.offload_optimizer and plan.recipe.optimizer == "adamw":
        found += ("cpu_adam",)
    if "nvme" in (layout.offload_optimizer, layout.offload_params):
        found += ("async_io",)
    return found


# ---- DeepSpeed over the process group that a run has brought up, as often as one process asks for it
#
# DeepSpeed keeps its groups in modules and makes them once. An engine that is set up anew, after a checkpoint
# or in another world, has to find them as they were at import.


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
