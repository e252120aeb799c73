"""DeepSpeed's ``MoE`` layers in the place of a Mixtral's: each rank keeps its own experts alone.

Routing is the same: of a softmax over all experts the largest two or more, weighted so that they sum to one,
and no token is dropped, whatever that makes an expert wait for (deepspeed/moe/sharded_moe.py, ``top2gating``
and ``topkgating``; transformers' ``MixtralTopKRouter``). Imported once ``deepspeed`` knows its accelerator.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.moe.layer import MoE
from torch.nn import Parameter, functional


class GatedExpert(torch.nn.Module):  # type: ignore[misc]
    """Single expert, with its matrices in the layout of transformers' stacked experts."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, activation: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = Parameter(gate_up), Parameter(down)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(ranks, 1, tokens, hidden) to the same shape."""
        gate, up = functional.linear(x, self.gate_up_proj).chunk(2, dim=-1)
        return functional.linear(self.activation(gate) * up, self.down_proj)


class MoeBlock(torch.nn.Module):  # type: ignore[misc]
    """What a decoder layer calls: hidden states in, hidden states out."""

    def __init__(self, block: Any, *, ep: int, ep_rank: int) -> None:
        super().__init__()
        whole, router = block.experts, block.gate
        num_experts, hidden = router.weight.shape
        each = num_experts // ep
        self.numbers = range(ep_rank * each, (ep_rank + 1) * each)
        """Of this rank's experts in the whole layer."""
        # DeepSpeed copies the first expert for each expert of the rank.
        gate_up, down = (
            [tensor.detach()[number].clone() for number in self.numbers]
            for tensor in (whole.gate_up_proj, whole.down_proj)
        )
        self.moe = MoE(
            hidden,
            GatedExpert(gate_up[0], down[0], whole.act_fn),
            num_experts,
            ep_size=ep,
            k=router.top_k,
            min_capacity=0,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        with torch.no_grad():
            self.router.weight.copy_(router.weight)
            for expert, one_gate_up, one_down in zip(self.experts, gate_up, down, strict=True):
                expert.gate_up_proj.copy_(one_gate_up)
                expert.down_proj.copy_(one_down)

    @property
    def router(self) -> torch.nn.Linear:
        """Hidden states to a number for each expert of the whole layer."""
        found: torch.nn.Linear = self.moe.deepspeed_moe.gate.wg
        return found

    @property
    def experts(self) -> list[GatedExpert]:
        """This rank's."""
        return list(self.moe.deepspeed_moe.experts.deepspeed_experts)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, hidden) to the same shape."""
        try:
            output: torch.Tensor = self.moe(hidden_states)[0]
            return output
        finally:
            # No loss here asks how even the load is. Kept, it would keep the graph of its making: of a layer
            # that is computed again, which ends by an exception, all that is saved, until the next step.
            self.moe.deepspeed_moe.l_aux = None


def spread_experts(model: torch.nn.Module, *, ep: int, ep_rank: int) -> None:
    """Replace the MoE layers of ``model`` by DeepSpeed's, with its weights; drop other ranks' experts."""
    for layer in model.model.layers:
        layer.mlp = MoeBlock(layer.mlp, ep=ep, ep_rank=ep_rank)


def expert_groups(optimizer: torch.optim.Optimizer) -> None:
    """Give experts groups of their own, by which DeepSpeed knows them; their options stay.

    As ``split_params_into_different_moe_groups_for_optimizer`` (deepspeed/moe/utils.py), over groups that
    differ in their decay, and one group whatever its size.
    """
    apart = []
    for number, group in enumerate(optimizer.param_groups):
        own = [parameter for parameter in group["params"] if not getattr(parameter, "allreduce", True)]
        group["name"] = f"dense {number}"
        if own:
            kept = {id(parameter) for parameter in own}
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in kept]
            apart.append({**group, "params": own, "moe": True, "name": own[0].group_name})
    optimizer.param_groups.extend(apart)
