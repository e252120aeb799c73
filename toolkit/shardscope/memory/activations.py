"""What forward leaves for backward, operator by operator, as the modules that will run save it.

Every entry is one tensor that autograd holds, in bytes for one token of one layer. The lists were checked
against ``torch.autograd.graph.saved_tensors_hooks`` over transformers' own modules
(tests/runs/test_saved_tensors.py), and reduce to Korthikanti et al. 2022, eq. 1-5, for a GPT layer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardscope.memory.lora import adapter_targets
from shardscope.memory.precision import FP32, widths

if TYPE_CHECKING:
    from shardscope.architecture import Architecture
    from shardscope.plan import Plan


class Saved(NamedTuple):
    """One tensor that forward keeps for backward."""

    operator: Literal["norms", "attention", "mlp", "experts"]
    bytes_per_token: int
    cut_by: Literal["tp", "sequence"]
    """``tp``: always divided by it; ``sequence``: only with sequence parallelism."""


class LayerActivations(NamedTuple):
    """Bytes for one token of one layer on one rank."""

    norms: int
    attention: int
    mlp: int
    saved: int
    """All that stays until this layer's backward, recomputation considered."""
    working: int
    """What backward needs beside it while it is in this layer: gradients in flight and what was recomputed."""


class Modules(NamedTuple):
    """Whose modules run and in which types; everything that changes what they save."""

    kernels: str
    autocast: bool
    """Weights stay fp32 and each matrix product casts its own input (torch.autocast)."""
    compute: int
    """Bytes of a number in matrix products."""
    targets: tuple[str, ...] | None
    """Adapted projections; None in full training."""


def modules_of(plan: Plan) -> Modules:
    """Which modules a plan runs."""
    recipe = plan.recipe
    return Modules(
        kernels=plan.kernels,
        autocast=plan.layout.mixes_by_autocast and recipe.precision.endswith("mixed") and recipe.method == "full",
        compute=widths[recipe.precision].compute,
        targets=adapter_targets(plan.architecture, recipe) if recipe.method == "lora" else None,
    )


@lru_cache(maxsize=4096)
def layer_activations(
    architecture: Architecture, moe: bool, modules: Modules, recompute: str, tp: int, splits_sequence: bool
) -> LayerActivations:
    """Bytes one token leaves in one decoder layer, and what its backward needs beside them."""
    saved = saved_tensors(architecture, moe, modules)
    rest = tp if splits_sequence else 1

    def on_rank(tensors: tuple[Saved, ...], *operators: str) -> int:
        return sum(
            -(-tensor.bytes_per_token // (tp if tensor.cut_by == "tp" else rest))
            for tensor in tensors
            if not operators or tensor.operator in operators
        )

    everything = on_rank(saved)
    stream = -(-architecture.hidden_size * (FP32 if modules.autocast else modules.compute) // rest)
    if recompute == "full":
        kept = stream
    elif recompute == "selective":
        kept = min(everything, on_rank(kept_by_selective(architecture, moe, modules)))
    else:
        kept = everything
    width = _feed_forward_width(architecture, moe)
    # Backward of a gated MLP holds the gradients of its product and of both branches, and of its input.
    gradients = -(-3 * width * modules.compute // tp) + 2 * stream
    return LayerActivations(
        norms=on_rank(saved, "norms"),
        attention=on_rank(saved, "attention"),
        mlp=on_rank(saved, "mlp", "experts"),
        saved=kept,
        working=gradients + everything - kept,
    )


@lru_cache(maxsize=4096)
def saved_tensors(architecture: Architecture, moe: bool, modules: Modules) -> tuple[Saved, ...]:
    """Every tensor that one decoder layer saves with ``recompute="none"``."""
    if modules.kernels == "megatron":
        return _megatron_layer(architecture, moe, modules.compute)
    if architecture.norm == "layernorm":
        return _gpt2_layer(architecture, modules)
    return _transformers_layer(architecture, moe, modules)


def kept_by_selective(architecture: Architecture, moe: bool, modules: Modules) -> tuple[Saved, ...]:
    """What stays with ``recompute="selective"``.

    transformers' modules: the layer's input and the outputs of matrix products and attention (torch's selective
    activation checkpointing). Megatron's: all but the core attention's own output statistics, which flash
    attention has already made small (Korthikanti et al. 2022, section 5; Megatron-LM#1225).
    """
    if modules.kernels == "megatron":
        return tuple(t for t in saved_tensors(architecture, moe, modules) if t.operator != "attention") + (
            _tensor("attention", _attention_widths(architecture).inputs * modules.compute),
        )
    attention = _attention_widths(architecture)
    hidden = architecture.hidden_size
    c = modules.compute
    stream = FP32 if modules.autocast else c
    mlp_widths = 2 if architecture.gated_mlp else 1
    width = _feed_forward_width(architecture, moe)
    return (
        _tensor("norms", hidden * stream, "sequence"),
        _tensor("attention", (attention.inputs + attention.output) * c + FP32 * architecture.num_attention_heads),
        _tensor("attention", hidden * c, "sequence"),
        _tensor("mlp", mlp_widths * width * c),
        _tensor("mlp", hidden * c, "sequence"),
    )


class _AttentionWidths(NamedTuple):
    """Numbers a token has on each side of the attention kernel."""

    query: int
    key: int
    value: int
    output: int

    @property
    def inputs(self) -> int:
        return self.query + self.key + self.value


def _attention_widths(arch: Architecture) -> _AttentionWidths:
    heads = arch.num_attention_heads
    latent = arch.latent_attention
    if latent is not None:
        # DeepSeek-V2, section 2.1: training expands keys and values to all heads.
        query = heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
        return _AttentionWidths(query, query, heads * latent.v_head_dim, heads * latent.v_head_dim)
    kv = arch.num_key_value_heads * arch.head_dim
    return _AttentionWidths(heads * arch.head_dim, kv, kv, heads * arch.head_dim)


def _feed_forward_width(arch: Architecture, moe: bool) -> int:
    """Inner numbers that one token has in the MLP, or in all the experts that it visits."""
    experts = arch.mixture_of_experts
    if not moe or experts is None:
        return arch.intermediate_size
    routed = experts.num_experts_per_tok * experts.moe_intermediate_size
    return routed + experts.shared_expert_intermediate_size


def _tensor(
    operator: Literal["norms", "attention", "mlp", "experts"],
    bytes_per_token: int,
    cut_by: Literal["tp", "sequence"] = "tp",
) -> Saved:
    return Saved(operator, bytes_per_token, cut_by)


def _transformers_layer(arch: Architecture, moe: bool, modules: Modules) -> tuple[Saved, ...]:
    """A pre-norm RMSNorm layer of the transformers library: Llama, Mistral, Qwen, Gemma, Phi-3, DeepSeek."""
    c, hidden = modules.compute, arch.hidden_size
    trained = modules.targets is None
    attention = _attention_widths(arch)
    # RMSNorm upcasts: the fp32 input, 1/rms (one fp32 number) and, for the weight's gradient, the
    # normalised input. Under autocast the stream and so the normalised input stay fp32.
    norm = hidden * FP32 + FP32
    if trained:
        norm += hidden * (FP32 if modules.autocast or arch.norms_per_layer == 4 else c)
    tensors = [_tensor("norms", arch.norms_per_layer * norm, "sequence")]
    # A matrix product keeps its input if its weight (or its adapter) is trained; q, k, v share one
    # input, unless autocast casts it anew for each.
    feeds_attention = _distinct_inputs(modules, ("q_proj", "k_proj", "v_proj"))
    tensors.append(_tensor("norms", feeds_attention * hidden * c, "sequence"))
    tensors.append(_tensor("attention", (attention.inputs + attention.output) * c))
    tensors.append(_tensor("attention", FP32 * arch.num_attention_heads))
    if arch.qk_norm:
        normed = attention.query + attention.key
        heads = arch.num_attention_heads + arch.num_key_value_heads
        tensors.append(_tensor("attention", normed * (FP32 + c * trained) + FP32 * heads))
    if arch.latent_attention is not None:
        ranks = (arch.latent_attention.q_lora_rank or 0) + arch.latent_attention.kv_lora_rank
        tensors.append(_tensor("attention", ranks * (FP32 + 2 * c), "sequence"))
    tensors.extend(_lora_middles(modules))
    if moe:
        tensors.extend(_expert_tensors(arch, c))
        return tuple(tensors)
    feeds_mlp = _distinct_inputs(modules, ("gate_proj", "up_proj"))
    tensors.append(_tensor("norms", feeds_mlp * hidden * c, "sequence"))
    # silu(gate) * up: gate, silu(gate), up; and the product if the down projection is trained or adapted.
    down = trained or "down_proj" in (modules.targets or ())
    tensors.append(_tensor("mlp", (3 + down) * arch.intermediate_size * c))
    return tuple(tensors)


def _distinct_inputs(modules: Modules, projections: tuple[str, ...]) -> int:
    """Copies of one input that the given projections keep between them."""
    if modules.autocast:
        return len(projections)
    if modules.targets is None:
        return 1
    return int(any(projection in modules.targets for projection in projections))


def _lora_middles(modules: Modules) -> list[Saved]:
    # The adapter's narrow output feeds its second matrix; at rank 16 it is below a hundredth of its input.
    return [_tensor("attention", len(modules.targets) * 16 * modules.compute)] if modules.targets else []


def _expert_tensors(arch: Architecture, c: int) -> list[Saved]:
    """A dropless mixture: every token goes through top_k experts and the shared ones, evenly routed."""
    experts = arch.mixture_of_experts
    if experts is None:
        raise AssertionError("an expert layer of an architecture without experts")
    hidden, top_k = arch.hidden_size, experts.num_experts_per_tok
    routed = top_k * (2 * hidden + 4 * experts.moe_intermediate_size) * c
    shared = (hidden + 4 * experts.shared_expert_intermediate_size) * c
    router = experts.num_experts * 2 * FP32
    return [_tensor("experts", routed + shared), _tensor("experts", router, "sequence")]


def _gpt2_layer(arch: Architecture, modules: Modules) -> tuple[Saved, ...]:
    """GPT-2's layer in transformers: LayerNorm, one qkv projection, dropout 0.1, python-level gelu."""
    c, hidden = modules.compute, arch.hidden_size
    stream = FP32 if modules.autocast else c
    attention = _attention_widths(arch)
    mask = 1
    return (
        # Each LayerNorm keeps its input, mean and 1/std; its output feeds a matrix product.
        _tensor("norms", 2 * (hidden * stream + 2 * FP32 + hidden * c), "sequence"),
        _tensor("attention", (attention.inputs + attention.output) * c + FP32 * arch.num_attention_heads),
        _tensor("attention", 2 * hidden * mask, "sequence"),
        # 0.5 * x * (1 + tanh(...)): x, 0.5 x, the tanh, 1 + tanh, and the product.
        _tensor("mlp", 5 * arch.intermediate_size * c),
    )


def _megatron_layer(arch: Architecture, moe: bool, c: int) -> tuple[Saved, ...]:
    """Megatron-core with fused norms, flash attention and fused activations, without dropout."""
    hidden = arch.hidden_size
    attention = _attention_widths(arch)
    tensors = [
        # Two norms: each keeps its input; its output feeds a matrix product.
        _tensor("norms", 4 * hidden * c, "sequence"),
        _tensor("attention", (attention.inputs + attention.output) * c + FP32 * arch.num_attention_heads),
    ]
    if moe:
        return (*tensors, *_expert_tensors(arch, c))
    # The fused activation keeps its input (both branches if gated), the second product its input.
    branches = 2 if arch.gated_mlp else 1
    return (*tensors, _tensor("mlp", (branches + 1) * arch.intermediate_size * c))
