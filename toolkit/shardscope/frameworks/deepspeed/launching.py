"""What a run of ZeRO wants before its ranks fork: DeepSpeed imported once, its extensions compiled once."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from shardscope.plan import Plan

OLD_LOCK_SECONDS = 1800.0
"""torch waits for ever for a lock that a killed compiler left behind; none of these compiles for so long."""


def before_fork(plan: Plan, device_type: str) -> None:
    """Import DeepSpeed for the ranks' device, and load the extensions that the plan's offloading needs.

    The first load compiles, for a minute (Adam on the host) to four (files by libaio), into torch's folder of
    extensions, ``~/.cache/torch_extensions`` unless ``TORCH_EXTENSIONS_DIR`` says another: all later runs of
    this user find them there.
    """
    import_deepspeed(device_type)
    for name in extensions(plan):
        _drop_old_lock(name)
        began = time.perf_counter()
        _builder(name).load(verbose=False)
        seconds = time.perf_counter() - began
        if seconds > 10:
            print(f"compiled DeepSpeed's {name} in {seconds:.0f} s; the next run finds it", flush=True)


def import_deepspeed(device_type: str) -> Any:
    """``deepspeed``, quietly, with the accelerator that ranks of ``device_type`` have."""
    if device_type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    else:
        # A count by CUDA itself would leave forked ranks without it.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    deepspeed: Any = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def extensions(plan: Plan) -> tuple[str, ...]:
    """DeepSpeed's names of what has to be compiled for ``plan``."""
    layout: Any = plan.layout
    found: tuple[str, ...] = ()
    if layout.offload_optimizer and plan.recipe.optimizer == "adamw":
        found += ("cpu_adam",)
    if "nvme" in (layout.offload_optimizer, layout.offload_params):
        found += ("async_io",)
    return found


def _builder(name: str) -> Any:
    builders: Any = importlib.import_module("deepspeed.ops.op_builder")
    return {"cpu_adam": builders.CPUAdamBuilder, "async_io": builders.AsyncIOBuilder}[name]()


def _drop_old_lock(name: str) -> None:
    """A compiler that was killed cannot take its lock back."""
    from torch.utils.cpp_extension import _get_build_directory

    for extension in (name, "pin_memory"):
        lock = _lock_in(_get_build_directory(extension, False))
        with contextlib.suppress(OSError):
            if time.time() - lock.stat().st_mtime > OLD_LOCK_SECONDS:
                lock.unlink()


def _lock_in(folder: str) -> Path:
    from pathlib import Path

    return Path(folder) / "lock"
