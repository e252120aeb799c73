"""Megatron-core's defaults: fp32 gradient reduction, padded vocabulary, checkpoints that reshard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shardscope.frameworks.defaults import CheckpointFormat, CheckpointRequirement, ReduceType
from shardscope.frameworks.megatron import core_config
from shardscope.frameworks.megatron.layout import MegatronLayout, get_layout
from shardscope.frameworks.megatron.memory.precision_aware import reduces_in_fp32

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def get_reduce_type(plan: Plan) -> ReduceType:
    """Return the dtype of gradient reduction: fp32 with ``grad_reduce_in_fp32``, else the weights' dtype."""
    if plan.recipe.precision == "fp32" or reduces_in_fp32(get_layout(plan), plan.recipe):
        return "fp32"
    return "fp16" if plan.recipe.precision == "fp16-mixed" else "bf16"


def keeps_fp32_weights(plan: Plan) -> bool:
    """Return True: mixed-precision optimizers keep fp32 main weights, or the 16 bits that bf16 drops."""
    return True


def suggest_fp32_reduction(plan: Plan) -> tuple[str, Plan | None]:
    """Return the option that reduces gradients in fp32, and the plan with it."""
    assert isinstance(plan.layout, MegatronLayout)
    layout = replace(plan.layout, grad_reduce_in_fp32=True)
    return "grad_reduce_in_fp32=True", replace(plan, layout=layout)


def pad_vocab_size(plan: Plan) -> int:
    """Return the vocabulary size, padded to a multiple of 128 x tp."""
    return core_config.compute_padded_vocab_size(plan.architecture.vocab_size, plan.degrees.tp)


def get_checkpoint_format(plan: Plan) -> CheckpointFormat:
    """Return the ``torch_dist`` format, which reshards between any degrees.

    The engine requests "fully_reshardable" (``engine/checkpointing.py``). In Megatron-LM's training loop this
    is --dist-ckpt-optim-fully-reshardable; without it the distributed optimizer reshards over data-parallel
    ranks only ("dp_reshardable"). The distributed and the replicated optimizer name their state differently,
    so a checkpoint is tied to ``distributed_optimizer``.
    """
    assert isinstance(plan.layout, MegatronLayout)
    is_distributed = plan.layout.distributed_optimizer
    optimizer = CheckpointRequirement(
        value=is_distributed,
        text="the distributed optimizer" if is_distributed else "an optimizer replicated on every rank",
        layout={"distributed_optimizer": is_distributed},
    )
    return CheckpointFormat(
        name="Megatron's torch_dist checkpoint",
        requirements={"distributed_optimizer": optimizer},
        source="megatron/core/optimizer/distrib_optimizer.py, core 0.16: sharded_state_dict",
    )


def find_unused_options(plan: Plan) -> Mapping[str, str]:
    """Return the options without effect: ``cross_entropy_fusion_impl`` unless the loss is fused."""
    layout = get_layout(plan)
    if plan.recipe.loss != "fused" and layout.cross_entropy_fusion_impl != "native":
        return {"cross_entropy_fusion_impl": "with Recipe(loss='fused')"}
    return {}


def find_overlap_options(plan: Plan) -> Mapping[str, object]:
    """Return the overlap options that are off, for gradient reduction and the parameter all-gather."""
    # Megatron-LM's own default is off, too; parameters are all-gathered by the distributed optimizer only. In
    # a pipeline without interleaving that overlap costs more than it gains (``timing.py``).
    layout = get_layout(plan)
    names = ["overlap_grad_reduce"]
    if layout.distributed_optimizer and (plan.degrees.pp == 1 or plan.degrees.vpp > 1):
        names.append("overlap_param_gather")
    return {name: True for name in names if not getattr(layout, name)}
