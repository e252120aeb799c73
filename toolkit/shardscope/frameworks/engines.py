"""Registry of training engines, rehearsals and exports of each framework, imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.frameworks.formats.exported import Absent, Exported
    from shardscope.rehearsal.result import RehearsedStage
    from shardscope.rehearsal.torch_step import NoteProgress
    from shardscope.training.engine import Context, Engine

ENGINES = {
    "ddp": "ddp.engine.engine:DdpEngine",
    "fsdp2": "fsdp2.engine.create_engine:create_engine",
    "deepspeed": "deepspeed.engine.create_engine:create_engine",
    "megatron": "megatron.engine.engine:MegatronEngine",
}
"""Training engines, as ``module:class`` below ``shardscope.frameworks``; imported on a rank only."""
BEFORE_FORK = {
    "deepspeed": "deepspeed.engine.launching:before_fork",
    "megatron": "megatron.engine.launching:before_fork",
}
"""Functions that the launcher calls with a plan and "cuda" or "cpu" before it forks ranks. They set the
environment, import the modules that all ranks share and compile extensions, without initializing CUDA."""


def get_engine_class(plan: Plan) -> Callable[[Context], Engine]:
    """Return the engine class that trains ``plan``, or a function that returns the engine."""
    module, name = _import_part(ENGINES[plan.layout.framework])
    make_engine: Callable[[Context], Engine] = getattr(module, name)
    return make_engine


def before_fork(plan: Plan, device_type: str) -> None:
    """Run the framework's setup in the process that ranks are forked from, if it has any."""
    # Plain PyTorch needs no setup.
    if plan.layout.framework in BEFORE_FORK:
        module, name = _import_part(BEFORE_FORK[plan.layout.framework])
        getattr(module, name)(plan, device_type)


def rehearse(plan: Plan, note_progress: NoteProgress) -> list[RehearsedStage]:
    """Rehearse ``plan`` with its framework's own code on fake tensors. Returns one result per stage."""
    module = _import_module(f"{plan.layout.framework}.rehearsal.rehearse")
    stages: list[RehearsedStage] = module.rehearse(plan, note_progress)
    return stages


def render_files(plan: Plan) -> Sequence[Exported | Absent]:
    """Return the files of other tools that ``plan`` is exported to, and the reasons for missing ones."""
    module = _import_module(f"{plan.layout.framework}.files.export")
    files: Sequence[Exported | Absent] = module.render_files(plan)
    return files


def _import_part(path: str) -> tuple[ModuleType, str]:
    """Import the module of a path ``module:name`` below ``shardscope.frameworks``."""
    module, _, name = path.partition(":")
    return _import_module(module), name


def _import_module(name: str) -> ModuleType:
    # By name at run time: these modules import torch and their framework, which planning does without.
    return import_module(f"shardscope.frameworks.{name}")
