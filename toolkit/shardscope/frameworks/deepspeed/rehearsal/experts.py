"""DeepSpeed's MoE layers rehearsed: its gate, dispatch and experts over fake tensors.

Routing is what a rehearsal cannot have: how many tokens the busiest expert gets is read off numbers. It is
told here, by ``Recipe.expert_imbalance``, as the formulas are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.rehearsal.tracker import Tracker


def spread(plan: Plan, model: torch.nn.Module, tracker: Tracker) -> None:
    """Put DeepSpeed's layers in place; what this rank keeps of ``model`` is what its device holds of it."""
    from shardscope.frameworks.deepspeed.engine.experts_module import spread_experts

    ep = int(plan.degrees.ep)
    with tracker.paused():
        spread_experts(model, ep=ep, ep_rank=dist.get_rank() % ep)
    with tracker.labelling("parameters"):
        for parameter in model.parameters():
            parameter.data = torch.empty_like(parameter.data)


@contextlib.contextmanager
def routed(plan: Plan) -> Iterator[None]:
    """The busiest expert gets its share of tokens, and ``expert_imbalance`` times as many."""
    experts = plan.architecture.mixture_of_experts
    if plan.degrees.ep == 1 or experts is None:
        yield
        return
    from deepspeed.moe.sharded_moe import TopKGate

    recipe, gate = plan.recipe, TopKGate.forward
    chosen = recipe.micro_batch_size * recipe.seq_len * experts.num_experts_per_tok
    capacity = math.ceil(chosen * recipe.expert_imbalance / experts.num_experts)

    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss, _, *others = gate(self, *args, **kwargs)
        return loss, capacity, *others

    TopKGate.forward = told
    try:
        yield
    finally:
        TopKGate.forward = gate


def in_groups_of_experts(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Experts have groups of their own, by which DeepSpeed knows them; one whatever its size, as in a run."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    for number, group in enumerate(groups):
        group["name"] = f"dense {number}"
    found: list[dict[str, Any]] = split_params_into_different_moe_groups_for_optimizer(
        groups, max_group_size=math.inf
    )
    return found
