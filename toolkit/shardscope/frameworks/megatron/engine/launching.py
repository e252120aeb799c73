"""Preparation of a Megatron-core run before its ranks fork: environment variables and imports."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
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
