"""The frameworks Shardscope knows. Adding one is adding a folder and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from shardscope.core.errors import FieldError
from shardscope.frameworks.ddp.layout import DdpLayout
from shardscope.frameworks.deepspeed.layout import ZeroLayout
from shardscope.frameworks.fsdp2.layout import Fsdp2Layout
from shardscope.frameworks.megatron.layout import MegatronLayout

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.frameworks.defaults import Habits
    from shardscope.frameworks.grid import Grid
    from shardscope.memory.report import Term
    from shardscope.memory.state.stages import Shapes, Stage, StageShape
    from shardscope.memory.state.training_state import TrainingState
    from shardscope.timing.traffic import TimingModel

_DEGREES = ("tp", "pp", "vpp", "cp", "ep")


class MemoryModel(Protocol):
    """What every framework's ``memory/training_state.py`` offers.

    :meth:`stage` and :meth:`training_state` are arithmetic that broadcasts: for plans whose numbers are
    :class:`~shardscope.core.arrays.column.Column`, they return columns.
    """

    def shapes(self, plan: Plan) -> Shapes:
        """The pipeline stages, and which of them are alike."""

    def stage(self, plan: Plan, shape: StageShape) -> Stage:
        """The weights on one rank of a stage."""

    def training_state(self, plan: Plan, stage: Stage) -> TrainingState:
        """Bytes of parameters, gradients, optimizer and staging on one rank of a stage."""


class BuildingModel(Protocol):
    """What every framework's ``memory/building.py`` offers."""

    def on_host(self, plan: Plan) -> Term:
        """Host memory of one rank while it makes or loads the model, before any of it trains."""


class Limits(Protocol):
    """What every framework's ``limits.py`` offers. Imports no torch: a kernel asks before it launches."""

    def check_plan(self, plan: Plan) -> None:
        """Raise ``ValueError`` for a plan that the framework's engine does not train, naming what it does."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """What the registry knows of one framework without importing it."""

    name: str
    layout_class: type[Layout]
    effort: int = 3
    """What it asks of a team that does not know it: 0 and 1 torch alone, with and without sharding; 2 another
    library around the model; 3 another library's model."""

    @property
    def title(self) -> str:
        """The name that people read."""
        return self.layout_class.title

    def memory_model(self) -> MemoryModel:
        """The framework's own part of the memory model."""
        return _part(self.name, "memory.training_state")  # type: ignore[no-any-return]

    def building_model(self) -> BuildingModel:
        """How the framework's ranks come by their model."""
        return _part(self.name, "memory.building")  # type: ignore[no-any-return]

    def timing_model(self) -> TimingModel:
        """The framework's own part of the step's time."""
        return _part(self.name, "timing")  # type: ignore[no-any-return]

    def limits(self) -> Limits:
        """What the framework's engine runs of what can be planned."""
        return _part(self.name, "limits")  # type: ignore[no-any-return]

    def grids(self, architecture: Architecture, cluster: Cluster, recipe: Recipe) -> list[Grid]:
        """The layouts of the framework that a search asks."""
        return _part(self.name, "grid").grids(architecture, cluster, recipe)  # type: ignore[no-any-return]

    def habits(self) -> Habits:
        """What the framework does by itself that a preflight must know."""
        return _part(self.name, "defaults")  # type: ignore[no-any-return]


@cache
def _part(framework: str, module: str) -> Any:
    """A module of its folder: looked for once, since every formula asks."""
    return import_module(f"shardscope.frameworks.{framework}.{module}")


frameworks: dict[str, Framework] = {
    framework.name: framework
    for framework in (
        Framework(
            name="ddp",
            layout_class=DdpLayout,
            effort=0,
        ),
        Framework(
            name="fsdp2",
            layout_class=Fsdp2Layout,
            effort=1,
        ),
        Framework(
            name="deepspeed",
            layout_class=ZeroLayout,
            effort=2,
        ),
        Framework(
            name="megatron",
            layout_class=MegatronLayout,
            effort=3,
        ),
    )
}


def check_trained(plan: Plan) -> None:
    """Raise ``ValueError`` if no engine here trains ``plan``, naming what does train. Imports no torch."""
    try:
        frameworks[plan.layout.framework].limits().check_plan(plan)
    except FieldError as refusal:
        raise refusal.with_fix(_fix_with_others(refusal.fix, plan)) from None


def check_config(plan: Plan, config: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if ``plan`` would train the model of ``config``, a config.json, as another one.

    Asks the framework that computes some of it by itself; others train transformers' own module. Imports no
    torch.
    """
    limits: Any = frameworks[plan.layout.framework].limits()
    if hasattr(limits, "check_config"):
        limits.check_config(plan, config)


def why_not_trained(plan: Plan) -> str | None:
    """Why no engine here trains ``plan``, in words; None where one does. Imports no torch."""
    try:
        check_trained(plan)
    except ValueError as refusal:
        return str(refusal)
    return None


def is_trained(plan: Plan) -> bool:
    """Return whether an engine here trains ``plan``: :func:`why_not_trained` without the search for words."""
    try:
        frameworks[plan.layout.framework].limits().check_plan(plan)
    except ValueError:
        return False
    return True


def _fix_with_others(fix: str, plan: Plan) -> str:
    """``fix``, and after it the frameworks that train ``plan`` as it is and are not named there."""
    named = fix.lower()
    titles = [layout.title for layout in others_that_train(plan) if layout.framework not in named]
    if not titles:
        return fix
    listed = " or ".join([", ".join(titles[:-1]), titles[-1]] if len(titles) > 1 else titles)
    return f"{fix}, or {listed}, which {'trains' if len(titles) == 1 else 'train'} it"


def others_that_train(plan: Plan) -> list[Layout]:
    """The plainest layouts of other frameworks with the same degrees that train this model and recipe here.

    Whether they have room is for their own prediction to say.
    """
    degrees = {name: getattr(plan.layout, name) for name in _DEGREES if getattr(plan.layout, name, 1) > 1}
    found = []
    for name, framework in frameworks.items():
        has = {field.name for field in fields(framework.layout_class)}
        if name == plan.layout.framework or not degrees.keys() <= has:
            continue
        try:
            other = replace(plan, layout=framework.layout_class(**degrees))
            framework.limits().check_plan(other)
        except ValueError:
            continue
        found.append(other.layout)
    return found
