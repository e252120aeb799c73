"""What really trains, rehearses and exports a plan: each framework's own part, imported when it is asked."""

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
    "fsdp2": "fsdp2.engine.choice:engine_of",
    "deepspeed": "deepspeed.engine.choice:engine_of",
    "megatron": "megatron.engine.engine:MegatronEngine",
}
"""What trains, as ``module:class`` below ``shardscope.frameworks``; imported on a rank only."""
BEFORE_FORK = {
    "deepspeed": "deepspeed.engine.launching:before_fork",
    "megatron": "megatron.engine.launching:before_fork",
}
"""What is called with a plan and "cuda" or "cpu" in the launcher before it forks ranks: the environment and
the imports that all ranks share, and what would be compiled on each. It never initialises CUDA."""


def engine_for(plan: Plan) -> Callable[[Any], Any]:
    """The engine class that trains ``plan``."""
    engine: Callable[[Any], Any] = _named(ENGINES[plan.layout.framework])
    return engine


def before_fork(plan: Plan, device_type: str) -> None:
    """What the framework of ``plan`` wants done once, in the process that ranks are forked from."""
    place = BEFORE_FORK.get(plan.layout.framework)
    if place is not None:
        _named(place)(plan, device_type)


def rehearse(plan: Plan, say: Callable[[str, float], None]) -> list[RehearsedStage]:
    """The stages of ``plan`` as its framework's own code makes them on fake tensors."""
    stages: list[RehearsedStage] = _named(f"{plan.layout.framework}.rehearsal.rehearse:rehearse")(plan, say)
    return stages


def files_of(plan: Plan) -> Sequence[Exported | Absent]:
    """The files of other tools that ``plan`` is exported as, and those that there are none of."""
    found: Sequence[Exported | Absent] = _named(f"{plan.layout.framework}.files.export:files")(plan)
    return found


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"shardscope.frameworks.{module}"), name)
