"""Names and shapes of all parameters of a causal language model, as in transformers.

This module is the only definition of a layer's parameters: counts, FLOPs, LoRA targets and FSDP padding are
derived from it and therefore agree. Checked against ``transformers`` on the meta device in
``tests/unit/families/test_hf_config.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.families.parameter_names import list_mlp_inputs, list_norm_names, list_parameter_names
from shardscope.families.registry import find_family

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

LAYER_GROUPS = ("attention", "mlp", "experts", "shared_experts", "router", "norm")
"""Groups of parameters in a decoder layer."""


class Parameter(NamedTuple):
    """One parameter: unpacks as ``(group, name, shape)``."""

    group: str
    """One of :data:`LAYER_GROUPS`; outside of layers ``embedding``, ``position_embedding``, ``lm_head``."""
    name: str
    """Name in transformers; inside a layer, relative to the layer ("self_attn.q_proj.weight")."""
    shape: tuple[int, ...]
    """Shape as stored: Linear weights (out, in), GPT-2's Conv1D (in, out), experts (experts, out, in)."""


def list_layer_parameters(arch: Architecture, moe: bool) -> tuple[Parameter, ...]:
    """Return the parameters of one decoder layer, with routed experts if ``moe``."""
    if find_family(arch).projections == "conv1d":
        return (*_build_gpt2_attention(arch), *_build_gpt2_mlp(arch), *_build_norms(arch))
    attention = _build_latent_attention(arch) if arch.latent_attention else _build_attention(arch)
    feed_forward = _build_experts(arch) if moe else _build_mlp(arch, "mlp", "mlp", arch.intermediate_size)
    return (*attention, *feed_forward, *_build_norms(arch))


def list_outer_parameters(arch: Architecture) -> tuple[Parameter, ...]:
    """Return the parameters outside of the decoder layers, with full names; without a tied ``lm_head``."""
    vocabulary_shape, names = (arch.vocab_size, arch.hidden_size), list_parameter_names(arch)
    parameters = [Parameter("embedding", f"{names.embedding}.weight", vocabulary_shape)]
    if arch.position_embedding == "learned":
        positions = (arch.max_position_embeddings, arch.hidden_size)
        parameters.append(Parameter("position_embedding", "transformer.wpe.weight", positions))
    parameters += _build_norm(arch, names.final_norm, arch.hidden_size)
    if not arch.tie_word_embeddings:
        parameters.append(Parameter("lm_head", "lm_head.weight", vocabulary_shape))
    if find_family(arch).has_head_bias:  # a tied head still has a bias of its own
        parameters.append(Parameter("lm_head", "lm_head.bias", (arch.vocab_size,)))
    return tuple(parameters)


def get_lora_target(parameter: Parameter, conv1d: bool) -> tuple[str, tuple[int, int]] | None:
    """Return ``(target, (out_features, in_features))`` if PEFT can wrap the parameter's Linear, else None.

    The router and the fused experts are bare parameters in transformers 5, not Linears.
    """
    if len(parameter.shape) != 2 or parameter.group == "router" or not parameter.name.endswith(".weight"):
        return None
    first, second = parameter.shape
    return parameter.name.split(".")[-2], (second, first) if conv1d else (first, second)


def is_vector(parameter: Parameter) -> bool:
    """Return whether it is a norm or a bias (stacked experts' biases included), which have no matmul."""
    return len(parameter.shape) == 1 or parameter.name.endswith("_bias")


def _build_linear(group: str, name: str, out: int, inner: int, bias: bool) -> list[Parameter]:
    weight = Parameter(group, f"{name}.weight", (out, inner))
    return [weight, Parameter(group, f"{name}.bias", (out,))] if bias else [weight]


def _build_norm(arch: Architecture, name: str, size: int) -> list[Parameter]:
    weight = Parameter("norm", f"{name}.weight", (size,))
    return [weight, Parameter("norm", f"{name}.bias", (size,))] if arch.norm == "layernorm" else [weight]


def _build_norms(arch: Architecture) -> list[Parameter]:
    return [
        parameter for name in list_norm_names(arch) for parameter in _build_norm(arch, name, arch.hidden_size)
    ]


def _build_attention(arch: Architecture) -> list[Parameter]:
    hidden, head_dim, names = arch.hidden_size, arch.head_dim, list_parameter_names(arch)
    query, key = arch.num_attention_heads * head_dim, arch.num_key_value_heads * head_dim
    prefix, bias = names.attention, arch.attention_bias
    parameters: list[Parameter] = []
    if names.fused_qkv:
        parameters += _build_linear("attention", f"{prefix}.{names.fused_qkv}", query + 2 * key, hidden, bias)
    else:
        for name, size in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            parameters += _build_linear("attention", f"{prefix}.{name}", size, hidden, bias)
    parameters += _build_linear(
        "attention", f"{prefix}.{names.output}", hidden, query, arch.attention_output_bias
    )
    if arch.qk_norm:
        spans_all_heads = find_family(arch).qk_norm_over_all_heads
        for name, width in zip(names.query_key_norms, (query, key), strict=True):
            parameters += _build_norm(arch, f"{prefix}.{name}", width if spans_all_heads else head_dim)
    if find_family(arch).has_attention_sinks:
        parameters.append(Parameter("attention", f"{prefix}.sinks", (arch.num_attention_heads,)))
    return parameters


def _build_latent_attention(arch: Architecture) -> list[Parameter]:
    """Return multi-head latent attention's parameters (DeepSeek-V2, arXiv:2405.04434, eq. 9 to 19)."""
    latent = arch.latent_attention
    assert latent is not None
    hidden, heads, bias = arch.hidden_size, arch.num_attention_heads, arch.attention_bias
    query = heads * latent.qk_head_dim
    parameters: list[Parameter] = []
    if latent.q_lora_rank is None:
        parameters += _build_linear("attention", "self_attn.q_proj", query, hidden, False)
    else:
        parameters += _build_linear("attention", "self_attn.q_a_proj", latent.q_lora_rank, hidden, bias)
        parameters += _build_norm(arch, "self_attn.q_a_layernorm", latent.q_lora_rank)
        parameters += _build_linear("attention", "self_attn.q_b_proj", query, latent.q_lora_rank, False)
    compressed = latent.kv_lora_rank + latent.qk_rope_head_dim
    parameters += _build_linear("attention", "self_attn.kv_a_proj_with_mqa", compressed, hidden, bias)
    parameters += _build_norm(arch, "self_attn.kv_a_layernorm", latent.kv_lora_rank)
    expanded = heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    parameters += _build_linear("attention", "self_attn.kv_b_proj", expanded, latent.kv_lora_rank, False)
    output_bias = arch.attention_output_bias
    return parameters + _build_linear(
        "attention", "self_attn.o_proj", hidden, heads * latent.v_head_dim, output_bias
    )


def _build_mlp(arch: Architecture, group: str, name: str, size: int) -> list[Parameter]:
    hidden, bias, names = arch.hidden_size, arch.mlp_bias, list_parameter_names(arch)
    up: list[Parameter] = []
    for projection in list_mlp_inputs(arch):
        out = 2 * size if projection == names.fused_gate_up else size
        up += _build_linear(group, f"{name}.{projection}", out, hidden, bias)
    return up + _build_linear(group, f"{name}.{names.down}", hidden, size, bias)


def _build_experts(arch: Architecture) -> list[Parameter]:
    moe, names = arch.mixture_of_experts, list_parameter_names(arch)
    assert moe is not None
    hidden, size, count = arch.hidden_size, moe.moe_intermediate_size, moe.num_experts
    parameters = [Parameter("router", f"{names.router}.weight", (count, hidden))]
    if find_family(arch).has_clamped_experts:
        return [
            *parameters,
            Parameter("router", f"{names.router}.bias", (count,)),
            Parameter("experts", "mlp.experts.gate_up_proj", (count, hidden, 2 * size)),
            Parameter("experts", "mlp.experts.gate_up_proj_bias", (count, 2 * size)),
            Parameter("experts", "mlp.experts.down_proj", (count, size, hidden)),
            Parameter("experts", "mlp.experts.down_proj_bias", (count, hidden)),
        ]
    parameters += [
        Parameter("experts", "mlp.experts.gate_up_proj", (count, 2 * size, hidden)),
        Parameter("experts", "mlp.experts.down_proj", (count, hidden, size)),
    ]
    if moe.shared_expert_intermediate_size:
        shared = moe.shared_expert_intermediate_size
        parameters += _build_mlp(arch, "shared_experts", names.shared_experts, shared)
    if find_family(arch).has_shared_expert_gate:
        parameters += _build_linear("shared_experts", "mlp.shared_expert_gate", 1, hidden, False)
    return parameters


def _build_gpt2_attention(arch: Architecture) -> list[Parameter]:
    hidden = arch.hidden_size
    return [
        Parameter("attention", "attn.c_attn.weight", (hidden, 3 * hidden)),
        Parameter("attention", "attn.c_attn.bias", (3 * hidden,)),
        Parameter("attention", "attn.c_proj.weight", (hidden, hidden)),
        Parameter("attention", "attn.c_proj.bias", (hidden,)),
    ]


def _build_gpt2_mlp(arch: Architecture) -> list[Parameter]:
    hidden, size = arch.hidden_size, arch.intermediate_size
    return [
        Parameter("mlp", "mlp.c_fc.weight", (hidden, size)),
        Parameter("mlp", "mlp.c_fc.bias", (size,)),
        Parameter("mlp", "mlp.c_proj.weight", (size, hidden)),
        Parameter("mlp", "mlp.c_proj.bias", (hidden,)),
    ]


def find_first_layer(architecture: Architecture, moe: bool) -> int:
    """Return the index of the first decoder layer with (``moe``) or without routed experts."""
    return next(i for i in range(architecture.num_hidden_layers) if architecture.is_moe_layer(i) == moe)
