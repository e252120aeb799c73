"""DeepSpeed's plain script of expert parallelism: its ``MoE`` layers in the place of a Mixtral's."""

from __future__ import annotations

from shardscope.export.saving import IMPORTS as SAVE_IMPORTS

IMPORTS = f"""{SAVE_IMPORTS}
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
"""
CLIP_IMPORT = "from deepspeed.moe.utils import is_moe_param\n"

EXPERTS = '''
EP = @@EP@@  # ranks that share out the experts of each layer


class Expert(torch.nn.Module):
    """One expert, with its matrices as transformers stacks them."""

    def __init__(self, gate_up, down, activation):
        super().__init__()
        self.gate_up_proj, self.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)
        self.activation = activation

    def forward(self, x):
        gate, up = torch.nn.functional.linear(x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.nn.functional.linear(self.activation(gate) * up, self.down_proj)


class Experts(torch.nn.Module):
    """In the place of a layer's experts: DeepSpeed sends tokens to the ranks that have theirs."""

    def __init__(self, block):
        super().__init__()
        num_experts, hidden_size = block.gate.weight.shape
        each = num_experts // EP
        first = dist.get_rank() % EP * each
        stacks = (block.experts.gate_up_proj, block.experts.down_proj)
        matrices = [
            [stack[number].detach().clone() for stack in stacks] for number in range(first, first + each)
        ]
        self.moe = MoE(
            hidden_size,
            Expert(*matrices[0], block.experts.act_fn),  # which DeepSpeed copies
            num_experts,
            ep_size=EP,
            k=block.gate.top_k,
            min_capacity=0,
            drop_tokens=False,  # as transformers: an expert takes all that come
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        own = self.moe.deepspeed_moe
        with torch.no_grad():
            own.gate.wg.weight.copy_(block.gate.weight)
            for expert, (gate_up, down) in zip(own.experts.deepspeed_experts, matrices):
                expert.gate_up_proj.copy_(gate_up)
                expert.down_proj.copy_(down)

    def forward(self, hidden_states):
        try:
            return self.moe(hidden_states)[0]
        finally:
            # A loss of its own that nothing here adds; kept, it would keep a recomputed layer's graph.
            self.moe.deepspeed_moe.l_aux = None


def spread_experts(model):
    """DeepSpeed's layers in ``model``, with its weights; experts of other ranks go."""
    for layer in model.model.layers:
        layer.mlp = Experts(layer.mlp)
    return model
'''

SAVE = '''
    def save(self, folder):
        """Experts are gathered from the ranks that have them, in the type that forward reads."""
        model, is_first = self.engine.module, dist.get_rank() == 0
        weights = {name: one for name, one in model.state_dict().items() if ".moe." not in name}
        for number, layer in enumerate(model.model.layers):
            there, own = f"model.layers.{number}.mlp", layer.mlp.moe.deepspeed_moe
            weights[f"{there}.gate.weight"] = own.gate.wg.weight.detach().to(PARAMETERS)
            for name in ("gate_up_proj", "down_proj"):
                mine = torch.stack([getattr(one, name).detach() for one in own.experts.deepspeed_experts])
                parts = [torch.empty_like(mine) for _ in range(EP)]
                dist.all_gather(parts, mine, group=own.ep_group)
                weights[f"{there}.experts.{name}"] = torch.cat(parts).cpu() if is_first else None
        weights = {name: one.to("cpu", copy=True) for name, one in weights.items() if is_first}
        save_part(folder, model.config, weights, 0, 1)
'''

APART = """\
    for group, name in zip(groups, ("matrices", "vectors")):
        group["name"] = name
    groups = split_params_into_different_moe_groups_for_optimizer(groups, max_group_size=math.inf)
"""
"""Of ``build_optimizer``: experts have groups of their own, by which DeepSpeed knows them."""

HOOK = """\
        optimizer.register_step_pre_hook(lambda *_: clip(model))
"""
CLIP = '''

def clip(model):
    """By the norm over all ranks, each expert counted once: without ZeRO, DeepSpeed takes a rank's own."""
    squares = [0.0, 0.0]
    for parameter in model.parameters():
        squares[is_moe_param(parameter)] += parameter.grad.norm() ** 2
    dist.all_reduce(squares[1])
    norm = (squares[0] + squares[1] * EP / WORLD_SIZE).sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), MAX_GRAD_NORM, norm)
'''
