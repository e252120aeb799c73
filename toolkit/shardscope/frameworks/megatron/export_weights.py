"""What Megatron-core's plain script makes of a transformers model's weights: the Llama family's mapping."""

from __future__ import annotations

from textwrap import indent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.plan import Plan

LOAD = '''
@torch.no_grad()
def load(chunk, state, said):
    """This rank's part of transformers' weights (``state``) into a model chunk."""
    rank, size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    own = dict(chunk.named_parameters())

    def put(name, whole, rank=rank, size=size, cut=None):
        """``cut``: over which axis tensor-parallel ranks share the tensor."""
        own.pop(name).copy_(whole if cut is None else whole.chunk(size, dim=cut)[rank])

    def by_halves(gate, up, rank=rank, size=size):
        return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])

    def padded(name):
        whole = state[name]
        return torch.cat([whole, whole.new_zeros(PADDED_VOCAB_SIZE - len(whole), whole.shape[1])])

    if chunk.pre_process:
        put("embedding.word_embeddings.weight", padded("model.embed_tokens.weight"), cut=0)
    if chunk.post_process:
        put("decoder.final_layernorm.weight", state["model.norm.weight"])
        if "output_layer.weight" in own:  # a tied head is the embedding, or its copy on the last stage
            put("output_layer.weight", padded("lm_head.weight"), cut=0)
    for place, layer in enumerate(chunk.decoder.layers):
        here, there = f"decoder.layers.{place}.", f"model.layers.{layer.layer_number - 1}."
        put(f"{here}input_layernorm.weight", state[f"{there}input_layernorm.weight"])
        put(f"{here}pre_mlp_layernorm.weight", state[f"{there}post_attention_layernorm.weight"])
        attention, theirs = f"{here}self_attention.", f"{there}self_attn."
        for kind in ("weight", "bias"):
            if f"{attention}linear_qkv.{kind}" in own:  # queries, keys and values by key-value head
                found = [state[f"{theirs}{one}_proj.{kind}"] for one in "qkv"]
                heads = [one.view(said.num_key_value_heads, -1, *one.shape[1:]) for one in found]
                put(f"{attention}linear_qkv.{kind}", torch.cat(heads, dim=1).flatten(0, 1), cut=0)
        put(f"{attention}linear_proj.weight", state[f"{theirs}o_proj.weight"], cut=1)
        for one in "qk":
            if f"{attention}{one}_layernorm.weight" in own:
                put(f"{attention}{one}_layernorm.weight", state[f"{theirs}{one}_norm.weight"])
@@MLP@@    if own:
        raise SystemExit(f"no weights for {', '.join(own)}")
'''

DENSE = """\
        gate, up = (state[f"{there}mlp.{one}_proj.weight"] for one in ("gate", "up"))
        put(f"{here}mlp.linear_fc1.weight", by_halves(gate, up))
        put(f"{here}mlp.linear_fc2.weight", state[f"{there}mlp.down_proj.weight"], cut=1)
"""
EXPERTS = """\
        put(f"{here}mlp.router.weight", state[f"{there}mlp.gate.weight"])
        part = {
            "rank": parallel_state.get_expert_tensor_parallel_rank(),
            "size": parallel_state.get_expert_tensor_parallel_world_size(),
        }
        experts = layer.mlp.experts.local_experts
        first = parallel_state.get_expert_model_parallel_rank() * len(experts)
        for number in range(len(experts)):
            expert = f"{here}mlp.experts.local_experts.{number}."
            gate, up = state[f"{there}mlp.experts.gate_up_proj"][first + number].chunk(2)
            down = state[f"{there}mlp.experts.down_proj"][first + number]
            put(f"{expert}linear_fc1.weight", by_halves(gate, up, **part))
            put(f"{expert}linear_fc2.weight", down, **part, cut=1)
"""
"""Transformers stacks the matrices of all experts of a layer."""


def loads(plan: Plan) -> str:
    """The function ``load`` for ``plan``'s model."""
    arch = plan.architecture
    kinds = {arch.is_moe_layer(index) for index in range(arch.num_hidden_layers)}
    if kinds == {True, False}:
        experts, dense = (indent(text, "    ") for text in (EXPERTS, DENSE))
        mlp = f'        if f"{{there}}mlp.gate.weight" in state:\n{experts}        else:\n{dense}'
    else:
        mlp = EXPERTS if kinds == {True} else DENSE
    return LOAD.replace("@@MLP@@", mlp)
