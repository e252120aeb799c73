"""Registry of training engines, rehearsals and exports of each framework, imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.frameworks.formats.exported import Absent, Exported
    from shardscope.rehearsal.result import RehearsedStage

ENGINES = {
    "ddp": "ddp.engine.engine:DdpEngine",
    "fsdp2": "fsdp2.engine.choice:create_engine",
    "deepspeed": "deepspeed.engine.choice:create_engine",
    "megatron": "megatron.engine.engine:MegatronEngine",
}
"""Training engines, as ``module:class`` below ``shardscope.frameworks``; imported on a rank only."""
BEFORE_FORK = {
    "deepspeed": "deepspeed.engine.launching:before_fork",
    "megatron": "megatron.engine.launching:before_fork",
}
"""Functions that the launcher calls with a plan and "cuda" or "cpu" before it forks ranks. They set the
environment, import the modules that all ranks share and compile extensions, without initializing CUDA."""


def get_engine_class(plan: Plan) -> Callable[[Any], Any]:
    """Return the engine class that trains ``plan``."""
    engine: Callable[[Any], Any] = _import_name(ENGINES[plan.layout.framework])
    return engine


def before_fork(plan: Plan, device_type: str) -> None:
    """Run the framework's setup in the process that ranks are forked from, if it has any."""
    place = BEFORE_FORK.get(plan.layout.framework)
    if place is not None:
        _import_name(place)(plan, device_type)


def rehearse(plan: Plan, say: Callable[[str, float], None]) -> list[RehearsedStage]:
    """Rehearse ``plan`` with its framework's own code on fake tensors. Returns one result per stage."""
    stages: list[RehearsedStage] = _import_name(f"{plan.layout.framework}.rehearsal.rehearse:rehearse")(
        plan, say
    )
    return stages


def render_files(plan: Plan) -> Sequence[Exported | Absent]:
    """Return the files of other tools that ``plan`` is exported to, and the reasons for missing ones."""
    found: Sequence[Exported | Absent] = _import_name(f"{plan.layout.framework}.files.export:render_files")(
        plan
    )
    return found


def _import_name(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"shardscope.frameworks.{module}"), name)
