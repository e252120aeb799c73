"""What Megatron-core does by itself: fp32 reductions, a padded vocabulary, checkpoints that reshard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardscope.frameworks.defaults import CheckpointFormat, ReduceType, Tie
from shardscope.frameworks.megatron import core_config
from shardscope.frameworks.megatron.layout import MegatronLayout
from shardscope.frameworks.megatron.memory.precision_aware import reduces_in_fp32

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


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
    """``torch_dist`` over any degrees: the engine asks for "fully_reshardable" (``engine/checkpointing.py``).

    Megatron-LM's own loop does so by --dist-ckpt-optim-fully-reshardable; without it the distributed
    optimizer reshards over data-parallel ranks only ("dp_reshardable"). That optimizer and the one that every
    rank has whole call their state by other names.
    """
    assert isinstance(plan.layout, MegatronLayout)
    is_shared_out = plan.layout.distributed_optimizer
    optimizer = Tie(
        value=is_shared_out,
        words="the distributed optimizer" if is_shared_out else "an optimizer whole on every rank",
        layout={"distributed_optimizer": is_shared_out},
    )
    return CheckpointFormat(
        name="Megatron's torch_dist checkpoint",
        ties={"distributed_optimizer": optimizer},
        source="megatron/core/optimizer/distrib_optimizer.py, core 0.16: sharded_state_dict",
    )


def unused(plan: Plan) -> Mapping[str, str]:
    """Whose fused loss it is, where the loss is not fused."""
    layout: Any = plan.layout
    if plan.recipe.loss != "fused" and layout.cross_entropy_fusion_impl != "native":
        return {"cross_entropy_fusion_impl": "with Recipe(loss='fused')"}
    return {}


def overlaps(plan: Plan) -> Mapping[str, object]:
    """Of gradients, and of the weights that the distributed optimizer gathers."""
    layout: Any = plan.layout
    names = ["overlap_grad_reduce", *(["overlap_param_gather"] if layout.distributed_optimizer else [])]
    return {name: True for name in names if not getattr(layout, name)}
