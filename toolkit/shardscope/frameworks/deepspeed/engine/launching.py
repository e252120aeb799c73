"""What a run of ZeRO wants before its ranks fork: DeepSpeed imported once, its extensions loaded once."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

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
