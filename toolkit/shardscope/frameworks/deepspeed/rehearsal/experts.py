"""DeepSpeed's MoE layers on fake tensors: its gate, dispatch and experts.

A rehearsal cannot route tokens, because fake tensors have no values: the tokens of the busiest expert follow
from ``Recipe.expert_imbalance``, as in the formulas.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardscope.rehearsal.patching import patch_attributes

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.rehearsal.tracker import Tracker


def replace_moe_layers(plan: Plan, model: torch.nn.Module, tracker: Tracker) -> None:
    """Replace the MoE layers of ``model`` by DeepSpeed's, and allocate its parameters on the device."""
    from shardscope.frameworks.deepspeed.engine.experts_module import replace_experts

    ep = int(plan.degrees.ep)
    # DeepSpeed's layers copy transformers' weights, on the host; only the result moves to the device.
    with tracker.pause():
        replace_experts(model, ep=ep, ep_rank=dist.get_rank() % ep)
    with tracker.label_new_storages("parameters"):
        for parameter in model.parameters():
            parameter.data = torch.empty_like(parameter.data)


@contextlib.contextmanager
def set_expert_capacity(plan: Plan) -> Iterator[None]:
    """Let DeepSpeed's gate return the capacity of the busiest expert: ``expert_imbalance`` times the mean."""
    experts = plan.architecture.mixture_of_experts
    if plan.degrees.ep == 1 or experts is None:
        yield
        return
    from deepspeed.moe.sharded_moe import TopKGate

    recipe, forward = plan.recipe, TopKGate.forward
    num_routed = recipe.micro_batch_size * recipe.seq_len * experts.num_experts_per_tok
    capacity = math.ceil(num_routed * recipe.expert_imbalance / experts.num_experts)

    def forward_with_capacity(self: torch.nn.Module, *args: object, **kwargs: object) -> tuple[object, ...]:
        loss, _, *others = forward(self, *args, **kwargs)
        return loss, capacity, *others

    with patch_attributes([(TopKGate, "forward", forward_with_capacity)]):
        yield


def separate_expert_groups(groups: list[dict[str, object]]) -> list[dict[str, object]]:
    """Move experts into one parameter group of their own, which DeepSpeed requires."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    for number, group in enumerate(groups):
        group["name"] = f"dense {number}"
    separated: list[dict[str, object]] = split_params_into_different_moe_groups_for_optimizer(
        groups, max_group_size=math.inf
    )
    return separated
