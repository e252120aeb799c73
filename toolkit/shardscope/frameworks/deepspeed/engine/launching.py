"""Start of DeepSpeed: import, compiled extensions, and connection to torch's process group."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

import torch.distributed as dist

from shardscope.frameworks.deepspeed import extensions
from shardscope.frameworks.deepspeed.layout import get_layout

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def before_fork(plan: Plan, device_type: str) -> None:
    """Import DeepSpeed for the ranks' device, and load the extensions that the plan's offloading needs.

    The first load of each extension compiles it, for one minute (CPU Adam) to four (libaio); later runs of
    this user load the compiled library.
    """
    import_deepspeed(device_type)
    for name in list_needed_extensions(plan):
        extensions.load_extension(name)


def import_deepspeed(device_type: str) -> ModuleType:
    """Import ``deepspeed`` without its log messages, with the accelerator of ``device_type``."""
    # Always set it: a rehearsal in this process may have set another.
    os.environ["DS_ACCELERATOR"] = device_type
    if device_type == "cuda":
        # Counting devices with CUDA would initialize it here, and forked ranks could not use it.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # torch 2.13 renames the collectives that DeepSpeed calls, and warns at every step.
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use `torch.distributed", append=True)
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def list_needed_extensions(plan: Plan) -> tuple[str, ...]:
    """Return DeepSpeed's names of the extensions that ``plan`` needs compiled."""
    layout = get_layout(plan)
    names: tuple[str, ...] = ()
    if layout.offload_optimizer and plan.recipe.optimizer == "adamw":
        names += ("cpu_adam",)
    if "nvme" in (layout.offload_optimizer, layout.offload_params):
        names += ("async_io",)
    return names


# ---- DeepSpeed's process groups
#
# DeepSpeed keeps them in module variables and creates them once. For another engine in the same process,
# after a checkpoint or with another world size, those variables must be as they were at import.


STATEFUL_NAMES = ("mpu", "mesh_device", "expert_tensor_parallel_world_size")
"""Lower-case module variables of ``deepspeed.utils.groups`` that it sets; the others are in capitals."""
_initial_groups: dict[str, object] = {}


def connect_deepspeed(backend: str, rank: int) -> None:
    """Let DeepSpeed use torch's process group as its world, and forget the groups of an earlier engine."""
    # Imported here: DeepSpeed chooses its accelerator when it is first imported.
    import deepspeed
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    # init_distributed reads these even if the group exists; torchrun sets all of them.
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", dist.get_world_size())):
        os.environ.setdefault(name, str(value))
    if not _initial_groups:
        names = (name for name in vars(groups) if name.isupper() or name in STATEFUL_NAMES)
        _initial_groups.update({name: _copy_dict(getattr(groups, name)) for name in names})
    for name, initial in _initial_groups.items():
        setattr(groups, name, _copy_dict(initial))
    comm.cdb = None
    # The shared-memory reductions must be compiled, and support one world per process.
    # By import_module: as an attribute, ``deepspeed.comm.torch`` is torch itself.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    deepspeed.init_distributed(backend)


def _copy_dict(value: object) -> object:
    return dict(value) if isinstance(value, dict) else value
