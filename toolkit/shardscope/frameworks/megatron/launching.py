"""What a run of Megatron-core wants before its ranks fork: its modules imported once for all of them."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.plan import Plan

MODULES = (
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "shardscope.frameworks.megatron.engine",
)


def before_fork(plan: Plan, device_type: str) -> None:
    """Import megatron-core, which says with four warnings what else could be installed.

    Not for GPU ranks where Transformer Engine is: megatron-core imports it, it may use CUDA as it is imported
    (https://github.com/NVIDIA/TransformerEngine/issues/872), and ranks forked after that could not any more.
    """
    if device_type == "cuda" and importlib.util.find_spec("transformer_engine") is not None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES:
            importlib.import_module(name)
