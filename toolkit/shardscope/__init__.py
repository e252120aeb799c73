"""Shardscope: will it fit, how fast will it be, show me.

The names below are the public interface. Each module is imported when one of its names is first used, so
that ``import shardscope`` costs milliseconds and never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# Not lazy: the package ``shardscope.runs`` would otherwise hide the function of the same name as soon as
# anything imports it.
from shardscope.core.version import __version__ as __version__
from shardscope.runs import runs

if TYPE_CHECKING:
    from shardscope.catalog import gpus, models
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.frameworks.accelerate.script import Script
    from shardscope.planner.advice.advice import recommend
    from shardscope.planner.search.search import search
    from shardscope.runs.backends.ray.target import Ray
    from shardscope.runs.backends.slurm import Slurm
    from shardscope.runs.calibrate.process import calibrate
    from shardscope.runs.launch.launch import launch
    from shardscope.runs.run import Run
    from shardscope.runs.sweep import sweep
    from shardscope.runs.trained.merge import merge
    from shardscope.trace import Trace
    from shardscope.training.tasks.finetune import Finetune
    from shardscope.training.tasks.pretrain import Pretrain
    from shardscope.training.weights.example_models import example_model

__all__ = [
    "Architecture",
    "Cluster",
    "Finetune",
    "Layout",
    "Plan",
    "Pretrain",
    "Ray",
    "Recipe",
    "Run",
    "Script",
    "Slurm",
    "Trace",
    "calibrate",
    "example_model",
    "gpus",
    "launch",
    "merge",
    "models",
    "recommend",
    "runs",
    "search",
    "sweep",
]

# Each public name and the module that defines it, imported on first use.
_modules = {
    "Architecture": "core.architecture",
    "Cluster": "core.cluster",
    "Finetune": "training.tasks.finetune",
    "Layout": "core.layout",
    "Plan": "core.plan",
    "Pretrain": "training.tasks.pretrain",
    "Ray": "runs.backends.ray.target",
    "Recipe": "core.recipe",
    "Run": "runs.run",
    "Script": "frameworks.accelerate.script",
    "Slurm": "runs.backends.slurm",
    "Trace": "trace",
    "calibrate": "runs.calibrate.process",
    "example_model": "training.weights.example_models",
    "gpus": "catalog",
    "launch": "runs.launch.launch",
    "merge": "runs.trained.merge",
    "models": "catalog",
    "recommend": "planner.advice.advice",
    "search": "planner.search.search",
    "sweep": "runs.sweep",
}


def __getattr__(name: str) -> object:
    if name not in _modules:
        raise AttributeError(f"module 'shardscope' has no attribute {name!r}; it has {', '.join(__all__)}")
    value: object = getattr(import_module(f"shardscope.{_modules[name]}"), name)
    # Later accesses find the global, without calling this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
