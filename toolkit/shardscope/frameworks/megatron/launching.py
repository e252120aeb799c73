"""What a run of Megatron-core wants before its ranks fork: its modules imported once for all of them."""

from __future__ import annotations

import importlib
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
    """Import megatron-core, which says with four warnings what else could be installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES:
            importlib.import_module(name)
