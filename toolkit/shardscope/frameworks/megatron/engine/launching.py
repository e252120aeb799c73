"""Preparation of a Megatron-core run before its ranks fork: environment variables and imports."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

MODULES = (
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "shardscope.frameworks.megatron.engine.engine",
)

ONE_CONNECTION = "CUDA_DEVICE_MAX_CONNECTIONS"

STASH_KERNELS = "megatron.core.transformer.moe.ops.paged_stash"
STASH_NAMES = ("GLOBAL_BLOCK_SIZE", "paged_stash_copy_kernel", "paged_stash_pop_kernel")


def wants_one_connection(plan: Plan) -> bool:
    """Return whether megatron-core needs ``CUDA_DEVICE_MAX_CONNECTIONS=1``: kernels start in call order.

    Then a tensor- or context-parallel collective starts before the compute that it overlaps with.
    Megatron-LM's validate_args asserts it up to Hopper; Blackwell does not need it.
    """
    is_older = not (plan.cluster.gpu.architecture or "").startswith("blackwell")
    return plan.on_gpu and is_older and (plan.degrees.tp > 1 or plan.degrees.cp > 1)


def before_fork(plan: Plan, device_type: str) -> None:
    """Set the environment variable that megatron-core needs, unless the user has, and import megatron-core.

    The import's four warnings about optional packages are suppressed. For GPU ranks with Transformer Engine
    nothing is imported: megatron-core imports Transformer Engine, which may initialize CUDA
    (https://github.com/NVIDIA/TransformerEngine/issues/872), and then forked ranks could not use CUDA.
    """
    if device_type == "cuda" and wants_one_connection(plan):
        os.environ.setdefault(ONE_CONNECTION, "1")
    if device_type == "cuda" and importlib.util.find_spec("transformer_engine") is not None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES:
            importlib.import_module(name)


def stand_in_for_triton_kernels() -> None:
    """Let this process import megatron-core without Triton, which torch's CPU builds do not bring.

    megatron-core 0.19 imports Triton unconditionally in one module: the kernels of ``moe_paged_stash``, which
    neither engine nor rehearsal enables. This registers a module without kernels in its place. Other
    releases do not import that module.
    """
    if importlib.util.find_spec("triton") is None and STASH_KERNELS not in sys.modules:
        kernels = ModuleType(STASH_KERNELS)
        vars(kernels).update(dict.fromkeys(STASH_NAMES))
        sys.modules[STASH_KERNELS] = kernels
