"""What Megatron-core does by itself: fp32 reductions, a padded vocabulary, checkpoints that reshard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from shardscope.frameworks.habits import CheckpointFormat, ReduceType
from shardscope.frameworks.megatron import core_config
from shardscope.frameworks.megatron.layout import MegatronLayout
from shardscope.frameworks.megatron.precision_aware import reduces_in_fp32

if TYPE_CHECKING:
    from shardscope.plan import Plan
    from shardscope.planner.preflight.finding import Finding
    from shardscope.planner.preflight.script import Script


def reduces_in(plan: Plan) -> ReduceType:
    """``grad_reduce_in_fp32``, or the weights' type."""
    if plan.recipe.precision == "fp32" or reduces_in_fp32(plan.layout, plan.recipe):
        return "fp32"
    return "fp16" if plan.recipe.precision == "fp16-mixed" else "bf16"


def keeps_fp32_weights(plan: Plan) -> bool:
    """Its mixed-precision optimizers keep main weights, whole or as what bf16 left over."""
    return True


def reduce_remedy(plan: Plan) -> tuple[str, Plan | None]:
    """Its own switch."""
    assert isinstance(plan.layout, MegatronLayout)
    layout = replace(plan.layout, grad_reduce_in_fp32=True)
    return "grad_reduce_in_fp32=True", replace(plan, layout=layout)


def padded_vocab_size(plan: Plan) -> int:
    """To a multiple of 128 x tp."""
    return int(core_config.padded_vocab_size(plan.architecture.vocab_size, plan.degrees.tp))


def checkpoint(plan: Plan) -> CheckpointFormat:
    """``torch_dist``: weights reshard freely, the distributed optimizer over data-parallel ranks only.

    Its format is "dp_reshardable" unless asked for "fully_reshardable" (distrib_optimizer.py, core 0.16).
    """
    assert isinstance(plan.layout, MegatronLayout)
    tied = ("tp", "pp", "ep") if plan.layout.distributed_optimizer else ()
    return CheckpointFormat(
        name="Megatron's torch_dist checkpoint",
        tied_to=tuple(name for name in tied if getattr(plan.degrees, name) > 1),
        remedy="Save with --dist-ckpt-optim-fully-reshardable",
        source="megatron/core/optimizer/distrib_optimizer.py, core 0.16: sharded_state_dict",
    )


def in_script(script: Script) -> Iterator[Finding]:
    """Nothing of it is gone."""
    yield from ()
