"""What Megatron-core's plain script makes of a transformers model's weights, and of its own to save them."""

from __future__ import annotations

from textwrap import indent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.plan import Plan

MAPPING = """

def mapping(chunk, said):
    \"\"\"Every parameter of a chunk: its name, what of transformers it is made of, how.@@MANY@@\"\"\"
    own = dict(chunk.named_parameters())
"""
MANY = " Experts have a list."

LLAMA = """\
    if chunk.pre_process:
        yield "embedding.word_embeddings.weight", ["model.embed_tokens.weight"], "padded"
    if chunk.post_process:
        yield "decoder.final_layernorm.weight", ["model.norm.weight"], "whole"
        if "output_layer.weight" in own:  # a tied head is the embedding, or its copy on the last stage
            yield "output_layer.weight", ["lm_head.weight"], "padded"
    for place, layer in enumerate(chunk.decoder.layers):
        here, there = f"decoder.layers.{place}.", f"model.layers.{layer.layer_number - 1}."
        yield f"{here}input_layernorm.weight", [f"{there}input_layernorm.weight"], "whole"
        yield f"{here}pre_mlp_layernorm.weight", [f"{there}post_attention_layernorm.weight"], "whole"
        attention, theirs = f"{here}self_attention.", f"{there}self_attn."
        for kind in ("weight", "bias"):
            if f"{attention}linear_qkv.{kind}" in own:
                three = [f"{theirs}{one}_proj.{kind}" for one in "qkv"]
                yield f"{attention}linear_qkv.{kind}", three, "heads"
            if f"{attention}linear_proj.{kind}" in own:
                yield f"{attention}linear_proj.{kind}", [f"{theirs}o_proj.{kind}"], "whole"
        for one in "qk":
            if f"{attention}{one}_layernorm.weight" in own:
                yield f"{attention}{one}_layernorm.weight", [f"{theirs}{one}_norm.weight"], "whole"
"""
DENSE = """\
        for kind in ("weight", "bias"):
            if f"{here}mlp.linear_fc1.{kind}" in own:
                both = [f"{there}mlp.{one}_proj.{kind}" for one in ("gate", "up")]
                yield f"{here}mlp.linear_fc1.{kind}", both, "gated"
                yield f"{here}mlp.linear_fc2.{kind}", [f"{there}mlp.down_proj.{kind}"], "whole"
"""
EXPERTS = """\
        yield f"{here}mlp.router.weight", [f"{there}mlp.gate.weight"], "whole"
        count = len(layer.mlp.experts.local_experts)
        experts = [f"{here}mlp.experts.local_experts.{number}." for number in range(count)]
        yield [f"{one}linear_fc1.weight" for one in experts], [f"{there}mlp.experts.gate_up_proj"], "gated"
        yield [f"{one}linear_fc2.weight" for one in experts], [f"{there}mlp.experts.down_proj"], "whole"
"""
"""Transformers stacks the matrices of all experts of a layer."""

GPT2 = """\
    if chunk.pre_process:
        yield "embedding.word_embeddings.weight", ["transformer.wte.weight"], "padded"
        yield "embedding.position_embeddings.weight", ["transformer.wpe.weight"], "whole"
    if chunk.post_process:
        if "output_layer.weight" in own:  # a tied head is the embedding, or its copy on the last stage
            yield "output_layer.weight", ["lm_head.weight"], "padded"
        for kind in ("weight", "bias"):
            yield f"decoder.final_layernorm.{kind}", [f"transformer.ln_f.{kind}"], "whole"
    for place, layer in enumerate(chunk.decoder.layers):
        here, there = f"decoder.layers.{place}.", f"transformer.h.{layer.layer_number - 1}."
        for kind in ("weight", "bias"):
            yield f"{here}input_layernorm.{kind}", [f"{there}ln_1.{kind}"], "whole"
            yield f"{here}pre_mlp_layernorm.{kind}", [f"{there}ln_2.{kind}"], "whole"
            yield f"{here}self_attention.linear_qkv.{kind}", [f"{there}attn.c_attn.{kind}"], "heads"
            yield f"{here}self_attention.linear_proj.{kind}", [f"{there}attn.c_proj.{kind}"], "turned"
            yield f"{here}mlp.linear_fc1.{kind}", [f"{there}mlp.c_fc.{kind}"], "turned"
            yield f"{here}mlp.linear_fc2.{kind}", [f"{there}mlp.c_proj.{kind}"], "turned"
"""

JOINED = '''

def to_core(tensors, how, said):
    """Tensors of transformers as one of Megatron-core's."""
    if how == "padded":
        (rows,) = tensors
        return torch.cat([rows, rows.new_zeros(PADDED_VOCAB_SIZE - len(rows), rows.shape[1])])
    if how == "heads":  # queries, keys and values by key-value head
        groups = [one.unflatten(0, (said.num_key_value_heads, -1)) for one in tensors]
        return torch.cat(groups, dim=1).flatten(0, 1)
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def to_transformers(whole, how, said):
    """And back."""
    if how == "padded":
        return [whole[: MODEL_CONFIG["vocab_size"]]]
    if how == "heads":
        groups = whole.unflatten(0, (said.num_key_value_heads, -1))
        queries = said.num_attention_heads // said.num_key_value_heads
        width = groups.shape[1] // (queries + 2)
        return [one.flatten(0, 1) for one in groups.split([queries * width, width, width], dim=1)]
    return whole.chunk(2) if how == "gated" else [whole]
'''
GPT2_JOINED = '''

def to_core(tensors, how, said):
    """A tensor of transformers as Megatron-core has it: a Conv1D's matrix lies the other way round."""
    (whole,) = tensors
    if how == "padded":
        return torch.cat([whole, whole.new_zeros(PADDED_VOCAB_SIZE - len(whole), whole.shape[1])])
    if how == "heads":  # queries, keys and values by head
        return whole.t().unflatten(0, (3, said.num_attention_heads, -1)).transpose(0, 1).flatten(0, 2)
    return whole.t() if how == "turned" else whole


def to_transformers(whole, how, said):
    """And back."""
    if how == "padded":
        return [whole[: MODEL_CONFIG["vocab_size"]]]
    if how == "heads":
        whole = whole.unflatten(0, (said.num_attention_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return [whole.t() if how in ("heads", "turned") else whole]
'''

CUT = '''

def cut(whole, parameter, how, rank, size):
    """The part of one tensor-parallel rank; of a gate and what it gates, a part of each."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    axis = parameter.partition_dim
    strips = whole.chunk(2 if how == "gated" else 1, dim=axis)
    return torch.cat([strip.chunk(size, dim=axis)[rank] for strip in strips], dim=axis)


def joined(parameter, how, group):
    """The whole, of which the ranks of ``group`` have parts."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return parameter.detach()
    axis, parts = parameter.partition_dim, [torch.empty_like(parameter) for _ in range(group.size())]
    dist.all_gather(parts, parameter.detach().contiguous(), group=group)
    strips = zip(*(part.chunk(2 if how == "gated" else 1, dim=axis) for part in parts))
    return torch.cat([part for strip in strips for part in strip], dim=axis)


@torch.no_grad()
def load(chunk, state, said):
    """This rank's part of transformers' weights (``state``) into a model chunk."""
    group, own = parallel_state.get_tensor_model_parallel_group(), dict(chunk.named_parameters())
    for name, theirs, how in mapping(chunk, said):
@@LOAD_EXPERTS@@        whole, parameter = to_core([state[one] for one in theirs], how, said), own.pop(name)
        parameter.copy_(cut(whole, parameter, how, group.rank(), group.size()))
    if own:
        raise SystemExit(f"no weights for {', '.join(own)}")


@torch.no_grad()
def taken(chunk, said):
    """A model chunk's weights as transformers has them, one by one: all ranks of the stage together."""
    group, own = parallel_state.get_tensor_model_parallel_group(), dict(chunk.named_parameters())
    for name, theirs, how in mapping(chunk, said):
@@TAKE_EXPERTS@@        yield from zip(theirs, to_transformers(joined(own[name], how, group), how, said))
'''
LOAD_EXPERTS = """\
        if isinstance(name, list):
            inside = parallel_state.get_expert_tensor_parallel_group()
            first = parallel_state.get_expert_model_parallel_rank() * len(name)
            for one, whole in zip(name, state[theirs[0]][first:]):
                parameter = own.pop(one)
                parameter.copy_(cut(whole, parameter, how, inside.rank(), inside.size()))
            continue
"""
TAKE_EXPERTS = """\
        if isinstance(name, list):
            inside = parallel_state.get_expert_tensor_parallel_group()
            spread = parallel_state.get_expert_model_parallel_group()
            here = torch.stack([joined(own[one], how, inside) for one in name])
            parts = [torch.empty_like(here) for _ in range(spread.size())]
            dist.all_gather(parts, here, group=spread)
            yield theirs[0], torch.cat(parts)
            continue
"""


def loads(plan: Plan) -> str:
    """The functions ``load`` and ``taken`` for ``plan``'s model."""
    arch = plan.architecture
    experts = arch.mixture_of_experts is not None
    text = MAPPING.replace("@@MANY@@", MANY if experts else "")
    text += GPT2 + GPT2_JOINED if arch.model_type == "gpt2" else LLAMA + _mlp(plan) + JOINED
    cuts = CUT.replace("@@LOAD_EXPERTS@@", LOAD_EXPERTS if experts else "")
    return text + cuts.replace("@@TAKE_EXPERTS@@", TAKE_EXPERTS if experts else "")


def _mlp(plan: Plan) -> str:
    arch = plan.architecture
    kinds = {arch.is_moe_layer(index) for index in range(arch.num_hidden_layers)}
    if kinds == {True, False}:
        experts, dense = (indent(text, "    ") for text in (EXPERTS, DENSE))
        return f'        if hasattr(layer.mlp, "router"):\n{experts}        else:\n{dense}'
    return EXPERTS if kinds == {True} else DENSE
