"""What every framework's module here offers: how Accelerate is told of a plan, and what it made of it.

Accelerate reads the environment when a script says ``Accelerator()``. Each framework knows its own words for
that; here is what they share. No torch: a kernel asks before it launches.
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
"""What Accelerate reads; a kernel's own such variables would make another run of the plan."""
KEPT = ("ACCELERATE_USE_CPU",)
"""What the launcher says for CPU ranks."""


class Accelerated(Protocol):
    """What every framework's module here offers."""

    def check_installed(self, plan: Plan) -> None:
        """Raise ``ValueError`` where this machine lacks what Accelerate calls for ``plan``."""

    def distributed_types(self, plan: Plan) -> tuple[str, ...]:
        """Names of ``accelerate.DistributedType`` that an ``Accelerator()`` of this plan may have."""

    def environment(self, plan: Plan, folder: Path) -> dict[str, str]:
        """Variables that Accelerate reads; files that they name are written into ``folder``."""

    def told(self, plan: Plan, accelerator: Any) -> None:
        """Say to a new ``Accelerator`` what the environment has no words for."""

    def what_it_is(self, plan: Plan, accelerator: Any, model: Any) -> dict[str, Any]:
        """What the prepared ``model`` is, read back from it, with one entry ``words``.

        Raises ``RuntimeError`` where that is not the plan's.
        """


def accelerated(plan: Plan) -> Accelerated:
    """The framework's part."""
    from shardscope.frameworks.accelerate import ddp, deepspeed, fsdp2, megatron  # they import this module

    parts: dict[str, Accelerated] = {"ddp": ddp, "fsdp2": fsdp2, "deepspeed": deepspeed, "megatron": megatron}
    return parts[plan.layout.framework]


def environment_of(plan: Plan, folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """``inherited`` with what Accelerate is to read of ``plan``, and nothing else of the kind."""
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
    """Raise ``ValueError`` for a plan that no script becomes here, naming what runs it instead."""
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
    """The error of a script that became something else than its plan."""
    return RuntimeError(
        f"the plan says {planned}, and the script became {found}" + (f": {fix}" if fix else "")
    )
