"""What each family calls its parts: transformers' own names, by ``model_type``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


class Names(NamedTuple):
    """The names of one family's modules; inside a layer, relative to the layer."""

    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    attention: str = "self_attn"
    fused_qkv: str | None = None
    """One projection for query, key and value; None: one each."""
    output: str = "o_proj"
    fused_gate_up: str | None = None
    """One projection for gate and up; None: one each."""
    up: str = "up_proj"
    down: str = "down_proj"
    query_key_norms: tuple[str, str] = ("q_norm", "k_norm")
    router: str = "mlp.gate"
    shared_experts: str = "mlp.shared_experts"


_BLOOM = Names(
    layers="transformer.h",
    embedding="transformer.word_embeddings",
    final_norm="transformer.ln_f",
    attention="self_attention",
    fused_qkv="query_key_value",
    output="dense",
    up="dense_h_to_4h",
    down="dense_4h_to_h",
)
"""BLOOM's names, which Falcon has kept and GPT-NeoX in its layers."""
_GLM = Names(fused_gate_up="gate_up_proj")
_NAMES: dict[str, Names] = {
    "gpt2": Names(
        layers="transformer.h",
        embedding="transformer.wte",
        final_norm="transformer.ln_f",
        attention="attn",
        fused_qkv="c_attn",
        output="c_proj",
        up="c_fc",
        down="c_proj",
    ),
    "gpt_neox": _BLOOM._replace(
        layers="gpt_neox.layers",
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        attention="attention",
    ),
    "falcon": _BLOOM,
    "phi": Names(
        final_norm="model.final_layernorm",
        output="dense",
        up="fc1",
        down="fc2",
        query_key_norms=("q_layernorm", "k_layernorm"),
    ),
    "phi3": Names(fused_qkv="qkv_proj", fused_gate_up="gate_up_proj"),
    "glm": _GLM,
    "glm4": _GLM,
    "starcoder2": Names(up="c_fc", down="c_proj"),
    "qwen2_moe": Names(shared_experts="mlp.shared_expert"),
    "gpt_oss": Names(router="mlp.router"),
}
_DEFAULT = Names()


def names_of(arch: Architecture) -> Names:
    """How the family of ``arch`` names its modules."""
    return _NAMES.get(arch.model_type, _DEFAULT)


def norm_names(arch: Architecture) -> tuple[str, ...]:
    """The norms of hidden_size in one layer."""
    family = arch.model_type
    if family == "gpt2":
        return ("ln_1", "ln_2")
    if family == "olmo2":  # both halves are normalised behind, not before
        return ("post_attention_layernorm", "post_feedforward_layernorm")
    if family == "falcon" and arch.parallel_residual and arch.norms_per_layer == 2:
        return ("ln_attn", "ln_mlp")
    names = ("input_layernorm", "post_attention_layernorm")[: arch.norms_per_layer]
    if arch.norms_per_layer == 4:  # these also normalise what each half of the layer puts out
        glm = family == "glm4"
        names += (
            ("post_self_attn_layernorm", "post_mlp_layernorm")
            if glm
            else ("pre_feedforward_layernorm", "post_feedforward_layernorm")
        )
    return names


def mlp_inputs(arch: Architecture) -> tuple[str, ...]:
    """The projections that read the dense MLP's input."""
    names = names_of(arch)
    if not arch.gated_mlp:
        return (names.up,)
    return (names.fused_gate_up,) if names.fused_gate_up else ("gate_proj", "up_proj")


def attention_inputs(arch: Architecture) -> tuple[str, ...]:
    """The projections that read the attention's input."""
    if arch.latent_attention is not None:
        query = "q_a_proj" if arch.latent_attention.q_lora_rank else "q_proj"
        return (query, "kv_a_proj_with_mqa")
    fused = names_of(arch).fused_qkv
    return (fused,) if fused else ("q_proj", "k_proj", "v_proj")
