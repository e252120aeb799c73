"""Interface of the framework modules in this package, and the environment that they share.

Accelerate reads environment variables when a script creates ``Accelerator()``. Each framework module sets its
own. Imports no torch: a notebook kernel uses it before launching.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shardscope.core.errors import refuse
from shardscope.frameworks.accelerate import limits
from shardscope.frameworks.accelerate.carried import TITLE
from shardscope.frameworks.formats.accelerate_config import MIXED

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
"""Prefixes of the variables that Accelerate reads; inherited ones would change the run."""
KEPT = ("ACCELERATE_USE_CPU",)
"""Inherited variables to keep: the launcher sets this one for CPU ranks."""


class Accelerated(Protocol):
    """Interface of every framework module in this package."""

    def check_installed(self, plan: Plan) -> None:
        """Raise ``ValueError`` if this machine lacks a package that Accelerate needs for ``plan``."""

    def distributed_types(self, plan: Plan) -> tuple[str, ...]:
        """Return the ``accelerate.DistributedType`` names that an ``Accelerator()`` of this plan may have."""

    def environment(self, plan: Plan, folder: Path) -> dict[str, str]:
        """Return the variables for Accelerate, and write the files that they name into ``folder``."""

    def told(self, plan: Plan, accelerator: Any) -> None:
        """Set on a new ``Accelerator`` what environment variables cannot express."""

    def read_back(self, plan: Plan, accelerator: Any, model: Any) -> dict[str, Any]:
        """Describe the prepared ``model``, with a sentence as the entry ``words``.

        Raises ``RuntimeError`` if it contradicts the plan.
        """


def accelerated(plan: Plan) -> Accelerated:
    """Return the module of the plan's framework."""
    from shardscope.frameworks.accelerate import ddp, deepspeed, fsdp2, megatron  # they import this module

    parts: dict[str, Accelerated] = {"ddp": ddp, "fsdp2": fsdp2, "deepspeed": deepspeed, "megatron": megatron}
    return parts[plan.layout.framework]


def environment_of(plan: Plan, folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return ``inherited`` with Accelerate's variables replaced by those of ``plan``."""
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(PREFIXES) or name.startswith(KEPT)
    }
    precision = MIXED[plan.recipe.precision]
    own = {
        "ACCELERATE_MIXED_PRECISION": precision,
        # Accelerate prefers it to the number in the script.
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(plan.num_micro_batches),
    }
    if precision == "fp8":
        own["ACCELERATE_FP8_BACKEND"] = "AO"
    return {**kept, **own, **accelerated(plan).environment(plan, folder)}


def check_plan(plan: Plan) -> None:
    """Raise ``ValueError`` for a plan that no script can run here, naming what runs it instead."""
    limits.check_plan(plan)
    accelerated(plan).check_installed(plan)
    precision = plan.recipe.precision
    if precision == "fp16-mixed" and not plan.on_gpu:
        refuse(
            "Recipe.precision",
            precision,
            f"'bf16-mixed', 'bf16' or 'fp32' for a Script on CPU ranks: there {TITLE} trains fp16 in fp32 "
            "and does not say so (ss.Pretrain() and ctx.engine do train it)",
            {"precision": "bf16-mixed"},
        )
    if precision == "fp8-mixed" and importlib.util.find_spec("torchao") is None:
        refuse(
            "Recipe.precision",
            precision,
            f"'bf16-mixed' or another until torchao, through which {TITLE} makes 8-bit products, is there",
            "pip install torchao",
        )


def contradicts(planned: str, found: str, fix: str = "") -> RuntimeError:
    """Return the error for a script whose prepared model contradicts its plan."""
    return RuntimeError(
        f"the plan says {planned}, and the script became {found}" + (f": {fix}" if fix else "")
    )
