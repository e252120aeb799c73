"""Registry of frameworks: their layouts and formulas. ``engines.py`` has their training and exports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from shardscope.core.errors import FieldError, write_fix
from shardscope.core.fixes import find_complete_fix
from shardscope.core.layout import Layout
from shardscope.core.number_format import join_list
from shardscope.frameworks.ddp.layout import DdpLayout
from shardscope.frameworks.deepspeed.layout import ZeroLayout
from shardscope.frameworks.fsdp2.layout import Fsdp2Layout
from shardscope.frameworks.megatron.layout import MegatronLayout

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.frameworks.defaults import FrameworkDefaults
    from shardscope.frameworks.search_grid import Grid
    from shardscope.memory.report import Term
    from shardscope.memory.state.layer_sharding import StateSharding
    from shardscope.memory.state.stages import Stage, StageShape, StageShapes
    from shardscope.memory.state.training_state import TrainingState
    from shardscope.timing.traffic import TimingModel

_DEGREES = ("tp", "pp", "vpp", "cp", "ep")


class MemoryModel(Protocol):
    """Interface of every framework's ``memory/training_state.py``.

    :meth:`count_weights` and :meth:`compute_training_state` are arithmetic that broadcasts: for plans whose
    numbers are :class:`~shardscope.prediction.batch.column.Column`, they return columns.
    """

    counts_neighbours: bool
    """Whether a stage's memory depends on the stages around it: a middle stage receives from both sides, and
    so may need more than an earlier stage with more layers."""
    branches_on_stages: bool
    """Whether the formulas branch on pp > 1 with a plain ``if``, so all plans of one batch must agree."""

    def find_shapes(self, plan: Plan) -> StageShapes:
        """Return the shapes of the pipeline stages, grouped by identical stages."""

    def count_weights(self, plan: Plan, shape: StageShape) -> Stage:
        """Return the weights on one rank of a stage."""

    def compute_training_state(self, plan: Plan, stage: Stage) -> TrainingState:
        """Return the bytes of parameters, gradients, optimizer state and buffers on one rank of a stage."""


class ShardingModel(Protocol):
    """Interface of every framework's ``sharding.py``."""

    def list_chunk_layers(self, plan: Plan) -> list[int]:
        """Return the layers of each model chunk in the model's order: chunk c of stage s is c x pp + s."""

    def shard_layer(self, plan: Plan, stage: Stage, layer: int) -> StateSharding:
        """Return which parts of a layer's training state each data-parallel rank of ``stage`` holds.

        ``layer`` is its position on the stage, where layers with routed experts are the last.
        """


class BuildingModel(Protocol):
    """Interface of every framework's ``memory/building.py``."""

    def compute_host_memory(self, plan: Plan) -> Term:
        """Return the host memory of one rank while it builds or loads the model, before training. Bytes."""


class Limits(Protocol):
    """Interface of every framework's ``limits.py``. Imports no torch: notebooks check before a launch."""

    def check_plan(self, plan: Plan) -> None:
        """Raise ``ValueError`` for a plan that the engine does not train, with the allowed values."""


@runtime_checkable
class ConfigLimits(Protocol):
    """Optional interface of ``limits.py``, for frameworks that replace some of transformers' modules."""

    def check_config(self, plan: Plan, config: Mapping[str, object]) -> None:
        """Raise ``ValueError`` if ``plan`` would train another model than ``config``, a config.json."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Entry of one framework, whose modules are imported on first use."""

    # The layout class is imported with the registry, since ``Layout.*`` constructs it; the rest on first use.
    name: str
    layout_class: type[Layout]
    effort: int = 3
    """Effort to adopt the framework, from 0: 0 is plain torch without sharding, 1 plain torch with sharding,
    2 another library around the model, 3 another library's model."""
    package: str | None = None
    """Its distribution on PyPI; None: it is a part of torch."""

    @property
    def title(self) -> str:
        """Display name."""
        return self.layout_class.title

    def memory_model(self) -> MemoryModel:
        """Return the framework's memory formulas."""
        return _import_module(self.name, "memory.training_state")

    def sharding_model(self) -> ShardingModel:
        """Return the framework's placement of a layer's training state."""
        return _import_module(self.name, "sharding")

    def building_model(self) -> BuildingModel:
        """Return the formulas of host memory while ranks build the model."""
        return _import_module(self.name, "memory.building")

    def timing_model(self) -> TimingModel:
        """Return the framework's formulas of the step time."""
        return _import_module(self.name, "timing")

    def limits(self) -> Limits:
        """Return the checks of what the framework's engine can run."""
        return _import_module(self.name, "limits")

    def build_grids(self, architecture: Architecture, cluster: Cluster, recipe: Recipe) -> list[Grid]:
        """Return the framework's layouts that a search evaluates."""
        grids: list[Grid] = _import_module(self.name, "search_grid").build_grids(
            architecture, cluster, recipe
        )
        return grids

    def defaults(self) -> FrameworkDefaults:
        """Return the framework's defaults that the preflight checks depend on."""
        return _import_module(self.name, "defaults")


@cache
def _import_module(framework: str, module: str) -> ModuleType:
    """Import a module of a framework's package; cached, since every formula needs it."""
    # By name at run time: a framework's formulas are imported when its first plan is made.
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
            package="deepspeed",
        ),
        Framework(
            name="megatron",
            layout_class=MegatronLayout,
            effort=3,
            package="megatron-core",
        ),
    )
}


def check_trained(plan: Plan) -> None:
    """Raise ``ValueError`` if no engine trains ``plan``, with the allowed values. Imports no torch.

    The fix has all changes after which an engine trains the plan, and names the other frameworks that train
    it unchanged.
    """
    try:
        _check_limits(plan)
    except FieldError as refusal:
        # A limit knows its own field only: with its value another limit may apply, or the plan be invalid.
        fix = find_complete_fix(plan, refusal, _check_limits) or refusal.fix_values or refusal.fix
        # ``from None``: the same error with a longer fix, so one traceback is enough.
        raise refusal.with_fix(fix, _name_other_frameworks(write_fix(fix), plan)) from None


def _check_limits(plan: Plan) -> None:
    frameworks[plan.layout.framework].limits().check_plan(plan)


def check_config(plan: Plan, config: Mapping[str, object]) -> None:
    """Raise ``ValueError`` if ``plan`` would train another model than ``config``, a config.json, describes.

    Only frameworks that replace some of transformers' modules check this. Imports no torch.
    """
    limits = frameworks[plan.layout.framework].limits()
    if isinstance(limits, ConfigLimits):
        limits.check_config(plan, config)


def why_not_trained(plan: Plan) -> str | None:
    """Return why no engine trains ``plan``, as an error message; None if one does. Imports no torch."""
    try:
        check_trained(plan)
    except ValueError as refusal:
        return str(refusal)
    return None


def list_layout_names() -> dict[str, str]:
    """Return the framework of each of ``Layout``'s constructors, by the constructor's name."""
    names = [name for name, value in vars(Layout).items() if isinstance(value, staticmethod)]
    return {name: getattr(Layout, name)().framework for name in names}


def is_trained(plan: Plan) -> bool:
    """Return whether an engine trains ``plan``; faster than :func:`why_not_trained`, which finds a fix."""
    try:
        _check_limits(plan)
    except ValueError:
        return False
    return True


def _name_other_frameworks(fix: str, plan: Plan) -> str:
    """Return the frameworks not named in ``fix`` that train ``plan`` unchanged, as text that follows it."""
    # A fix may be code (``Layout.fsdp2()``) or a sentence: both contain the framework's name.
    text = fix.lower()
    titles = [layout.title for layout in find_other_layouts(plan) if layout.framework not in text]
    if not titles:
        return ""
    return f", or {join_list(titles, 'or')}, which {'trains' if len(titles) == 1 else 'train'} it"


def find_other_layouts(plan: Plan) -> list[Layout]:
    """Return default layouts of other frameworks, with the same degrees, that train this model and recipe.

    They may not fit in memory: that is not checked here.
    """
    degrees = {name: getattr(plan.layout, name) for name in _DEGREES if getattr(plan.layout, name, 1) > 1}
    layouts = []
    for name, framework in frameworks.items():
        # Degrees are all that frameworks have in common: one that lacks a degree in use cannot replace it.
        options = {field.name for field in fields(framework.layout_class)}
        if name == plan.layout.framework or not degrees.keys() <= options:
            continue
        # Other options have their defaults, with which the plan may be invalid or not trainable.
        try:
            other = replace(plan, layout=framework.layout_class(**degrees))
            framework.limits().check_plan(other)
        except ValueError:
            continue
        layouts.append(other.layout)
    return layouts
