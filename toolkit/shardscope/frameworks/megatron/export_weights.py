"""What Megatron-core's plain script makes of a transformers model's weights: Llama's mapping and GPT-2's."""

from __future__ import annotations

from textwrap import indent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.plan import Plan

START = '''
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

@@HALVES@@    def padded(name):
        whole = state[name]
        return torch.cat([whole, whole.new_zeros(PADDED_VOCAB_SIZE - len(whole), whole.shape[1])])
'''

LLAMA = """\
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
@@OUTPUT_BIAS@@        for one in "qk":
            if f"{attention}{one}_layernorm.weight" in own:
                put(f"{attention}{one}_layernorm.weight", state[f"{theirs}{one}_norm.weight"])
"""

GPT2 = """\
    if chunk.pre_process:
        put("embedding.word_embeddings.weight", padded("transformer.wte.weight"), cut=0)
        put("embedding.position_embeddings.weight", state["transformer.wpe.weight"])
    if chunk.post_process:
        for kind in ("weight", "bias"):
            put(f"decoder.final_layernorm.{kind}", state[f"transformer.ln_f.{kind}"])
        if "output_layer.weight" in own:  # a tied head is the embedding, or its copy on the last stage
            put("output_layer.weight", padded("lm_head.weight"), cut=0)
    for place, layer in enumerate(chunk.decoder.layers):
        here, there = f"decoder.layers.{place}.", f"transformer.h.{layer.layer_number - 1}."
        for kind in ("weight", "bias"):
            put(f"{here}input_layernorm.{kind}", state[f"{there}ln_1.{kind}"])
            put(f"{here}pre_mlp_layernorm.{kind}", state[f"{there}ln_2.{kind}"])
            whole = state[f"{there}attn.c_attn.{kind}"].t()  # a Conv1D's matrix lies the other way round
            heads = whole.view(3, said.num_attention_heads, -1, *whole.shape[1:]).transpose(0, 1)
            put(f"{here}self_attention.linear_qkv.{kind}", heads.flatten(0, 2), cut=0)
            put(f"{here}mlp.linear_fc1.{kind}", state[f"{there}mlp.c_fc.{kind}"].t(), cut=0)
        for one, name in (("self_attention.linear_proj", "attn.c_proj"), ("mlp.linear_fc2", "mlp.c_proj")):
            put(f"{here}{one}.weight", state[f"{there}{name}.weight"].t(), cut=1)
            put(f"{here}{one}.bias", state[f"{there}{name}.bias"])
"""

END = """\
    if own:
        raise SystemExit(f"no weights for {', '.join(own)}")
"""

HALVES = """\
    def by_halves(gate, up, rank=rank, size=size):
        return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])

"""
OUTPUT_BIAS = """\
        put(f"{attention}linear_proj.bias", state[f"{theirs}o_proj.bias"])
"""
MLP_BIAS = """\
        gate, up = (state[f"{there}mlp.{one}_proj.bias"] for one in ("gate", "up"))
        put(f"{here}mlp.linear_fc1.bias", by_halves(gate, up))
        put(f"{here}mlp.linear_fc2.bias", state[f"{there}mlp.down_proj.bias"])
"""
DENSE = """\
        gate, up = (state[f"{there}mlp.{one}_proj.weight"] for one in ("gate", "up"))
        put(f"{here}mlp.linear_fc1.weight", by_halves(gate, up))
        put(f"{here}mlp.linear_fc2.weight", state[f"{there}mlp.down_proj.weight"], cut=1)
@@MLP_BIAS@@"""
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
    if arch.model_type == "gpt2":
        return START.replace("@@HALVES@@", "") + GPT2 + END
    kinds = {arch.is_moe_layer(index) for index in range(arch.num_hidden_layers)}
    dense_mlp = DENSE.replace("@@MLP_BIAS@@", MLP_BIAS if arch.mlp_bias else "")
    if kinds == {True, False}:
        experts, dense = (indent(text, "    ") for text in (EXPERTS, dense_mlp))
        mlp = f'        if f"{{there}}mlp.gate.weight" in state:\n{experts}        else:\n{dense}'
    else:
        mlp = EXPERTS if kinds == {True} else dense_mlp
    body = LLAMA.replace("@@OUTPUT_BIAS@@", OUTPUT_BIAS if arch.attention_output_bias else "")
    return START.replace("@@HALVES@@", HALVES) + body + mlp + END
