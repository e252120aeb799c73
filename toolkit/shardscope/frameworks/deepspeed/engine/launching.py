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
from shardscope.frameworks.deepspeed.group_state import copy_groups, restore_groups
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


_initial_groups: dict[str, object] = {}
"""DeepSpeed's groups at import, for a later engine: after a checkpoint or with another world size."""


def connect_deepspeed(backend: str, rank: int) -> None:
    """Let DeepSpeed use torch's process group as its world, and forget the groups of an earlier engine."""
    # Imported here: DeepSpeed chooses its accelerator when it is first imported.
    import deepspeed

    # init_distributed reads these even if the group exists; torchrun sets all of them.
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", dist.get_world_size())):
        os.environ.setdefault(name, str(value))
    if not _initial_groups:
        _initial_groups.update(copy_groups())
    restore_groups(_initial_groups)
    # The shared-memory reductions must be compiled, and support one world per process.
    # By import_module: as an attribute, ``deepspeed.comm.torch`` is torch itself.
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    deepspeed.init_distributed(backend)
