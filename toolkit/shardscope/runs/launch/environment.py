"""Environment variables of the launcher and its ranks. The kernel's own environment is never changed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from shardscope.core.errors import refuse
from shardscope.machine.host import count_cores

RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables that a kernel started by torchrun or Slurm would pass on."""

KEPT_FREE_BYTES = 1 << 30
"""Freed memory that glibc's malloc keeps. A step frees all of its activations; if their pages are returned to
the kernel, the next step has thousands of page faults: 20 of 550 ms on two CPU ranks."""
HEAP_BYTES = 32 << 20
"""Size up to which malloc uses that memory; larger tensors are mapped and unmapped. It is the maximum of
M_MMAP_THRESHOLD (mallopt(3)); setting either value disables glibc's dynamic threshold, which depends on
earlier frees."""

LEAST_SECONDS = {"SHARDSCOPE_HANG_SECONDS": 0.1, "SHARDSCOPE_GRACE_SECONDS": 0.0}
"""Variables of a run that are seconds, with the least value that each may have."""

TOOLKIT_ROOT = str(Path(__file__).absolute().parents[3])


def remove_rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without what torchrun or a scheduler has set around the kernel."""
    return {name: value for name, value in environment.items() if name not in RANK_VARIABLES}


def check_seconds(environment: Mapping[str, str]) -> None:
    """Raise ``ValueError`` for a variable of :data:`LEAST_SECONDS` that the supervisor could not read.

    There it would only be ignored, and the default would count.
    """
    for name, least in LEAST_SECONDS.items():
        text = environment.get(name)
        if not text:
            continue
        try:
            is_valid = float(text) >= least  # False for nan.
        except ValueError:
            is_valid = False
        if not is_valid:
            allowed = f"a number of seconds, at least {least:g}; inf for no limit"
            refuse(f"the environment variable {name}", text, allowed, f"unset {name} for the default")


def add_toolkit_to_path(environment: dict[str, str]) -> dict[str, str]:
    """Return ``environment`` with this toolkit on PYTHONPATH, so that ``python -m shardscope...`` works."""
    paths = [TOOLKIT_ROOT, *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def build_launcher_environment(
    inherited: dict[str, str], world_size: int, device: str, interface: str = "lo"
) -> dict[str, str]:
    """Return the launcher's environment for ``world_size`` ranks here on ``device`` ("cpu" or "cuda").

    ``interface`` is the network interface over which ranks connect to each other.
    """
    environment = remove_rank_variables(inherited)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // world_size)))
    environment["PYTHONUNBUFFERED"] = "1"
    # is_available() through NVML does not initialize CUDA, which would break the fork.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if sys.platform == "linux":
        # By default gloo resolves the host name, which often fails on laptops and in containers.
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        # By default NCCL listens on the first other interface; on one machine its data use no sockets anyway.
        # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
        environment.setdefault("NCCL_SOCKET_IFNAME", interface)
    if environment.get("MPLBACKEND", "").startswith("module://"):
        environment["MPLBACKEND"] = "Agg"  # The kernel's inline backend has no frontend in a rank.
    if device == "cpu":
        # Without the first, Accelerate's ranks on a CPU host silently become independent single processes;
        # without the second, libraries that detect a GPU themselves would use it in a CPU rehearsal.
        environment["ACCELERATE_USE_CPU"] = "1"
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment.setdefault("MALLOC_TRIM_THRESHOLD_", str(KEPT_FREE_BYTES))
        environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(HEAP_BYTES))
    return environment


def restore_python_path(original: str | None) -> None:
    """Undo :func:`add_toolkit_to_path` in this process, for programs that the user's code starts."""
    if original is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = original
