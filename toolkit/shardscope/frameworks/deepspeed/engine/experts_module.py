"""DeepSpeed's ``MoE`` layers as a replacement of Mixtral's, with only this rank's experts.

Routing is the same: the two or more largest probabilities of a softmax over all experts, normalized to sum to
one, and no token is dropped (deepspeed/moe/sharded_moe.py, ``top2gating`` and ``topkgating``; transformers'
``MixtralTopKRouter``). Import it after :func:`import_deepspeed`: importing ``deepspeed`` chooses its
accelerator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from deepspeed.moe.layer import MoE
from torch.nn import Parameter, functional
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from shardscope.training.model.recompute import list_decoder_layers


class GatedExpert(torch.nn.Module):
    """Single expert, with its matrices in the layout of transformers' stacked experts."""

    def __init__(
        self, gate_up: torch.Tensor, down: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = Parameter(gate_up), Parameter(down)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the expert on (ranks, 1, tokens, hidden). Return the same shape."""
        gate, up = functional.linear(x, self.gate_up_proj).chunk(2, dim=-1)
        return functional.linear(self.activation(gate) * up, self.down_proj)


class MoeBlock(torch.nn.Module):
    """MoE block of a decoder layer: transformers' ``block`` with DeepSpeed's ``MoE`` inside."""

    def __init__(self, block: MixtralSparseMoeBlock, *, ep: int, ep_rank: int) -> None:
        super().__init__()
        experts, router = block.experts, block.gate
        num_experts, hidden = router.weight.shape
        num_local = num_experts // ep
        self.numbers = range(ep_rank * num_local, (ep_rank + 1) * num_local)
        """Indices of this rank's experts in the full layer."""
        gate_up, down = (
            [tensor.detach()[number].clone() for number in self.numbers]
            for tensor in (experts.gate_up_proj, experts.down_proj)
        )
        # MoE makes copies of the expert that it gets; their weights are set below.
        self.moe = MoE(
            hidden,
            GatedExpert(gate_up[0], down[0], experts.act_fn),
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
        """Router: hidden states to one logit per expert of the full layer."""
        router: torch.nn.Linear = self.moe.deepspeed_moe.gate.wg
        return router

    @property
    def experts(self) -> list[GatedExpert]:
        """This rank's experts."""
        return list(self.moe.deepspeed_moe.experts.deepspeed_experts)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run the block on (batch, sequence, hidden). Return the same shape."""
        try:
            output: torch.Tensor = self.moe(hidden_states)[0]
            return output
        finally:
            # Drop the unused load balancing loss: it references its autograd graph, and with it all saved
            # tensors of a recomputed layer (whose forward ends with an exception), until the next step.
            self.moe.deepspeed_moe.l_aux = None


def replace_experts(model: torch.nn.Module, *, ep: int, ep_rank: int) -> None:
    """Replace the MoE layers of ``model`` by DeepSpeed's, with its weights; drop other ranks' experts."""
    for layer in list_decoder_layers(model):
        block = layer.get_submodule("mlp")
        assert isinstance(block, MixtralSparseMoeBlock)  # check_experts admits no other family
        layer.mlp = MoeBlock(block, ep=ep, ep_rank=ep_rank)


def separate_experts(optimizer: torch.optim.Optimizer) -> None:
    """Move experts into parameter groups of their own with the same options, which DeepSpeed requires.

    Like ``split_params_into_different_moe_groups_for_optimizer`` (deepspeed/moe/utils.py), but for several
    groups with different weight decay, and without splitting large groups.
    """
    expert_groups = []
    for number, group in enumerate(optimizer.param_groups):
        # DeepSpeed's MoE sets ``allreduce = False`` on its experts.
        experts = [parameter for parameter in group["params"] if not getattr(parameter, "allreduce", True)]
        group["name"] = f"dense {number}"
        if experts:
            expert_ids = {id(parameter) for parameter in experts}
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in expert_ids]
            expert_groups.append({**group, "params": experts, "moe": True, "name": experts[0].group_name})
    optimizer.param_groups.extend(expert_groups)
