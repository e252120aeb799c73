"""What a run of Megatron-core wants before its ranks fork: its environment, and its modules imported once."""

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
    """Whether megatron-core counts on kernels being started in the order of their calls.

    A collective of tensor or context parallel ranks then goes before the arithmetic that is to hide it.
    Megatron-LM's validate_args asserts it up to Hopper; Blackwell does not need it.
    """
    is_older = not (plan.cluster.gpu.architecture or "").startswith("blackwell")
    return plan.on_gpu and is_older and (plan.degrees.tp > 1 or plan.degrees.cp > 1)


def before_fork(plan: Plan, device_type: str) -> None:
    """Set what megatron-core counts on, unless somebody has, and import it.

    Its import says with four warnings what else could be installed. Not for GPU ranks where Transformer
    Engine is: megatron-core imports it, it may use CUDA as it is imported
    (https://github.com/NVIDIA/TransformerEngine/issues/872), and ranks forked after that could not any more.
    """
    if device_type == "cuda" and wants_one_connection(plan):
        os.environ.setdefault(ONE_CONNECTION, "1")
    if device_type == "cuda" and importlib.util.find_spec("transformer_engine") is not None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES:
            importlib.import_module(name)
