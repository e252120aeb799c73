"""Environment variables of the launcher and its ranks. The kernel's own environment is never touched."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardscope.machine.processes import num_cores

STALE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a kernel that itself was started by torchrun or Slurm would hand down."""

KEPT_FREE_BYTES = 1 << 30
"""What glibc's malloc keeps of freed memory. A step frees all of its activations; given back to the kernel,
their pages are faults again in the next step: thousands of them, 20 of 550 ms on two CPU ranks."""
HEAP_BYTES = 32 << 20
"""What malloc takes from that, and no more: larger tensors are mapped and unmapped (mallopt(3): the most that
M_MMAP_THRESHOLD can be; setting either ends glibc's own guess, which hangs on what was freed before)."""

TOOLKIT_ROOT = str(Path(__file__).absolute().parents[3])


def with_toolkit(environment: dict[str, str]) -> dict[str, str]:
    """``environment`` in which ``python -m shardscope...`` works however the kernel found us."""
    paths = [TOOLKIT_ROOT, *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def launcher_environment(inherited: dict[str, str], run: Mapping[str, Any]) -> dict[str, str]:
    """The launcher's environment for the run described by ``run.json``."""
    environment = {key: value for key, value in inherited.items() if key not in STALE}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // int(run["world_size"]))))
    environment["PYTHONUNBUFFERED"] = "1"
    # is_available() through NVML does not initialise CUDA, which would break the fork.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if sys.platform == "linux":
        # gloo otherwise resolves the host's name, which laptops and containers often cannot.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # NCCL would listen on the first other interface; on one machine its data go past sockets anyway.
        # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if environment.get("MPLBACKEND", "").startswith("module://"):
        environment["MPLBACKEND"] = "Agg"  # The kernel's inline backend has no front end in a rank.
    if run["device"] == "cpu":
        # Without the first, Accelerate's ranks on a CPU host are silent single-process copies; without the
        # second, libraries that look for a GPU themselves would make a CPU rehearsal something else.
        environment["ACCELERATE_USE_CPU"] = "1"
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment.setdefault("MALLOC_TRIM_THRESHOLD_", str(KEPT_FREE_BYTES))
        environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(HEAP_BYTES))
    return environment


def restore_python_path(original: str | None) -> None:
    """Undo :func:`with_toolkit` in this process, for what the user's code starts."""
    if original is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = original
