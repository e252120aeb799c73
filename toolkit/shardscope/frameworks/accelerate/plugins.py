"""What every framework's module here offers: how Accelerate is told of a plan, and what it made of it.

Accelerate reads the environment when a script says ``Accelerator()``. Each framework knows its own words for
that; here is what they share. No torch: a kernel asks before it launches.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shardscope.core.errors import Fix, refuse
from shardscope.frameworks.accelerate.carried import CARRIED, TITLE
from shardscope.frameworks.formats.accelerate_config import MIXED
from shardscope.frameworks.registry import why_not_trained

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
"""What Accelerate reads; a kernel's own such variables would make another run of the plan."""
KEPT = ("ACCELERATE_USE_CPU",)
"""What the launcher says for CPU ranks."""


class Accelerated(Protocol):
    """What every framework's module here offers."""

    def check_plan(self, plan: Plan) -> None:
        """Raise ``ValueError`` where Accelerate, wherever it runs, would make another run of ``plan``."""

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
    found: Any = import_module(f"shardscope.frameworks.accelerate.{plan.layout.framework}")
    return found  # type: ignore[no-any-return]


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
    framework = accelerated(plan)
    framework.check_plan(plan)
    framework.check_installed(plan)
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


def why_not_started(plan: Plan) -> str | None:
    """Why Accelerate would make another run of ``plan``, in words; None where it starts this one.

    The one answer for a Script, for advice and for exported files. What is not installed here is no reason.
    """
    try:
        accelerated(plan).check_plan(plan)
    except ValueError as refusal:
        return str(refusal)
    return None


def check_on_gpu(plan: Plan, plugin: str) -> None:
    """Raise ``ValueError`` on CPU ranks, where ``plugin`` becomes DDP, naming the engine to use instead."""
    if plan.on_gpu:
        return
    title = plan.layout.title
    why = f"there {TITLE}'s {plugin} silently becomes DDP"
    fix: Fix
    if why_not_trained(plan) is None:
        instead, fix = f"use the {title} engine", "ss.launch(plan, ss.Pretrain()), or f(ctx) with ctx.engine"
    else:
        instead, fix = "plan DDP", {"layout": "ddp"}
    refuse(
        "Layout.framework",
        plan.layout.framework,
        f"'ddp' for a Script on CPU ranks: {why}; {instead}",
        fix,
    )


def check_carried(plan: Plan) -> None:
    """Raise ``ValueError`` for the first field of the layout for which Accelerate has no word."""
    carried = CARRIED[plan.layout.framework]
    for field in fields(plan.layout):
        value = getattr(plan.layout, field.name)
        if field.name not in carried and value != field.default:
            refuse(
                f"Layout.{field.name}",
                value,
                f"{field.default!r} for a Script: {TITLE}'s plugin has no word for it, and the "
                f"{plan.layout.title} engine has (ss.Pretrain(), or f(ctx) with ctx.engine)",
                {field.name: field.default},
            )


def contradicts(planned: str, found: str, fix: str = "") -> RuntimeError:
    """The error of a script that became something else than its plan."""
    return RuntimeError(
        f"the plan says {planned}, and the script became {found}" + (f": {fix}" if fix else "")
    )
