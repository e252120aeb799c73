"""What forward leaves for backward on one rank: the modules' own lists, cut and recomputed as the plan says.

The lists in ``modules/`` name one tensor that autograd holds each. They were checked against what
transformers' own modules really keep (tests/runs/test_saved_tensors.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.arrays.arithmetic import holds
from shardscope.core.precision import FP32, widths
from shardscope.families.parameter_names import names_of
from shardscope.families.registry import family_of
from shardscope.memory.activations.modules.attention import (
    broadcasts_views,
    fused_attention,
    is_eager,
    layers_with_windows,
    masked,
)
from shardscope.memory.activations.modules.compiled import compiled_again, compiled_layer
from shardscope.memory.activations.modules.decoder import decoder_layer
from shardscope.memory.activations.modules.first_layer import unsaved_in_first_layer
from shardscope.memory.activations.modules.gpt2 import gpt2_layer
from shardscope.memory.activations.modules.known import check_known
from shardscope.memory.activations.modules.layernorm import casts_norms, layernorm_layer, norms_are_upcast
from shardscope.memory.activations.modules.liger import liger_edge, liger_layer
from shardscope.memory.activations.modules.megatron import megatron_layer, megatron_selective
from shardscope.memory.activations.modules.saved import Modules, Saved, stream_readers
from shardscope.memory.activations.modules.selective import held_by_products, selective_layer
from shardscope.memory.state.lora import adapter_targets, first_layer

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan


class LayerActivations(NamedTuple):
    """Bytes for one token of one layer on one rank."""

    norms: int
    attention: int
    mlp: int
    saved: int
    """All that stays until this layer's backward, recomputation considered."""
    offloaded: int
    """What waits in host memory instead."""
    recomputed: int
    """What backward computes again or fetches before it begins with the layer."""


def modules_of(plan: Plan) -> Modules:
    """Which modules a plan runs. Raises ``ValueError`` for a family whose activations are not known."""
    check_known(plan.architecture)
    recipe = plan.recipe
    lora = recipe.has_adapters
    autocast = plan.layout.mixes_by_autocast and recipe.precision.endswith("mixed")
    # DeepSpeed takes the place of torch.nn.functional.linear, not of products that are written out.
    uses_linear = family_of(plan.architecture).projections == "linear"
    return Modules(
        kernels=plan.kernels,
        autocast=autocast,
        compute=widths[recipe.precision].compute,
        seq_len=recipe.seq_len,
        targets=adapter_targets(plan.architecture, recipe) if lora else None,
        adapter_rank=recipe.adapter_rank if lora else 0,
        adapter_dropout=lora and recipe.lora_dropout > 0,
        on_gpu=plan.on_gpu,
        dropout=recipe.dropout,
        attention=recipe.attention,
        fused_attention=fused_attention(plan),
        broadcasts_views=holds(broadcasts_views(plan.architecture, recipe.micro_batch_size)),
        expert_load=recipe.expert_capacity_factor or recipe.expert_imbalance,
        quantized=recipe.base_quantization is not None,
        int8_base=recipe.base_quantization == "int8",
        eight_bit_inputs=recipe.precision == "fp8-mixed" and plan.kernels == "megatron",
        upcasts_norms=autocast and plan.on_gpu and norms_are_upcast(plan.architecture),
        keeps_frozen_inputs=lora and plan.layout.keeps_frozen_inputs and uses_linear,
    )


@lru_cache(maxsize=4096)
def layer_activations(
    architecture: Architecture,
    moe: bool,
    modules: Modules,
    recompute: str,
    tp: int,
    cut: int,
    joins: int = 0,
) -> LayerActivations:
    """Bytes one token leaves in one decoder layer; the residual stream is in ``cut`` parts.

    ``joins`` is 1 where attention's output is put together from parts of a sequence, laid by heads.

    Where some layers have a window and others none, that is the mean of both kinds, rounded up: exact over
    all layers together. What one layer needs while it goes backward is that of the larger kind.
    """
    if joins:
        modules = modules._replace(joins_by_heads=True)
    if modules.windowed is None and _mixes_windows(architecture, modules):
        inside, outside = (
            layer_activations(architecture, moe, modules._replace(windowed=windowed), recompute, tp, cut)
            for windowed in (True, False)
        )
        layers, sliding = architecture.num_hidden_layers, architecture.sliding_window_layers
        mean = LayerActivations(*(
            -(-(sliding * one + (layers - sliding) * other) // layers)
            for one, other in zip(inside, outside, strict=True)
        ))  # fmt: skip
        return mean._replace(
            recomputed=max(inside.recomputed, outside.recomputed),
        )
    saved = saved_tensors(architecture, moe, modules)
    parts = {
        "tp": tp,
        "key_value_heads": min(tp, architecture.num_key_value_heads),
        "sequence": cut,
        "whole": 1,
    }

    def on_rank(tensors: tuple[Saved, ...], *operators: str) -> int:
        return sum(
            -(-tensor.bytes_per_token // parts[tensor.cut_by])
            for tensor in tensors
            if not operators or tensor.operator in operators
        )

    everything = on_rank(saved)
    stream = -(-architecture.hidden_size * modules.stream // parts["sequence"])
    kept = everything
    if recompute == "full":
        kept = stream
    elif recompute == "selective":
        kept = on_rank(kept_by_selective(architecture, moe, modules))
    elif recompute == "offload" and modules.on_gpu:
        # On a CPU rank the host's memory is its own: nothing moves.
        kept = 0
    kept += held_by_products(architecture, moe, modules, recompute)
    return LayerActivations(
        norms=on_rank(saved, "norms"),
        attention=on_rank(saved, "attention"),
        mlp=on_rank(saved, "mlp", "experts"),
        saved=kept,
        offloaded=everything if kept == 0 else 0,
        recomputed=max(0, everything + kept_apart(architecture, moe, modules, recompute, stream) - kept),
    )


def kept_apart(arch: Architecture, moe: bool, modules: Modules, recompute: str, stream: int) -> int:
    """Of what recomputation keeps, bytes that a layer computed again does not save itself.

    The layer's input, where its first norm saves a copy in fp32 instead; and the last product, which is not
    asked for again: recomputation ends when autograd has all that it saves (torch.utils.checkpoint's early
    stop), unless a norm behind it saves it.
    """
    if recompute not in ("full", "selective"):
        return 0
    if modules.kernels == "compiled":
        return compiled_again(arch, modules)
    casts = arch.norm == "rmsnorm" and modules.kernels == "transformers" and modules.stream < FP32
    casts = casts or modules.normed > modules.stream
    if family_of(arch).is_post_norm:  # projections read the input without a norm
        casts = modules.stream > modules.compute or modules.recasts
    apart = stream if casts else 0
    experts = arch.mixture_of_experts
    ends_dense = not moe or experts is None or experts.shared_expert_intermediate_size > 0
    only_before = arch.norms_per_layer <= 2 and not family_of(arch).is_post_norm
    if recompute == "selective" and ends_dense and only_before:
        apart += arch.hidden_size * modules.compute
    return apart + held_by_products(arch, moe, modules, recompute)


def _mixes_windows(architecture: Architecture, modules: Modules) -> bool:
    """Whether a mask, which the layers with a window keep, tells them from the others."""
    return (
        modules.kernels != "megatron"
        and not is_eager(architecture, modules)
        and 0 < architecture.sliding_window_layers < architecture.num_hidden_layers
    )


@lru_cache(maxsize=4096)
def saved_tensors(architecture: Architecture, moe: bool, modules: Modules) -> tuple[Saved, ...]:
    """Every tensor that one decoder layer saves with ``recompute="none"``."""
    if modules.kernels == "megatron":
        return tuple(megatron_layer(architecture, moe, modules))
    if modules.kernels == "liger":
        tensors = liger_layer(architecture, modules)
    elif modules.kernels == "compiled":
        tensors = compiled_layer(architecture, modules)
    elif family_of(architecture).projections == "conv1d":
        tensors = gpt2_layer(architecture, modules)
    elif architecture.norm == "layernorm":
        tensors = layernorm_layer(architecture, modules)
    else:
        tensors = decoder_layer(architecture, moe, modules)
    return (*tensors, *_adapter_tensors(architecture, moe, modules), *_wide_branches(architecture, modules))


def _wide_branches(arch: Architecture, modules: Modules) -> list[Saved]:
    """What autocast makes of a quantised MLP: its products come out as wide as the norm's that they read."""
    if not (modules.quantized and modules.autocast):
        return []
    branches = 3 if arch.gated_mlp else 1
    return [Saved("mlp", branches * arch.intermediate_size * (modules.normed - modules.compute), "tp")]


@lru_cache(maxsize=4096)
def cast_weights(architecture: Architecture, moe: bool, modules: Modules) -> int:
    """Bytes of the half-precision copies that autocast makes of one layer's trained matrices.

    Routed experts have none; under adapters only these are in fp32.
    """
    if not modules.autocast:
        return 0
    layer = first_layer(architecture, moe)
    if modules.targets is not None:
        linears = architecture.layer_linears(layer)
        adapted = sum(sum(shape) for target, shape in linears if target in modules.targets)
        return modules.adapter_rank * adapted * modules.compute
    matrices = architecture.layer_matrix_parameters(layer)
    return sum(count for group, count in matrices.items() if group != "experts") * modules.compute


def casts_in_forward(modules: Modules, recompute: str) -> tuple[int, int]:
    """How often those copies are there once forward is behind a layer, and how often backward finds them.

    Autocast's cache has them until its block ends, and autograd has those that it needs. On a CPU rank what
    "offload" takes to the host is a second copy in the same memory.
    """
    copied = recompute == "offload" and not modules.on_gpu
    return 1 + copied, int(recompute == "none" or copied)


@lru_cache(maxsize=4096)
def masks_kept(architecture: Architecture, modules: Modules, recompute: str, interval: int = 1) -> int:
    """Bytes a token leaves in the masks that recomputed layers are called with again, once for all layers.

    One for layers with a window and one for those without, if any such layer is among those that are computed
    again (transformers/masking_utils.py): numbers where attention runs in plain operations, flags for SDPA,
    which needs none where it is causal only.
    """
    if recompute not in ("full", "selective") or modules.kernels == "megatron":
        return 0
    windows = layers_with_windows(architecture.num_hidden_layers, architecture.sliding_window_layers)
    again = windows[::interval]
    if is_eager(architecture, modules):
        return len(set(again)) * modules.seq_len * modules.stream
    needed = any(again) or not any(windows)  # Falcon needs one without windows
    return modules.seq_len if needed and masked(architecture, modules) else 0


@lru_cache(maxsize=4096)
def unsaved_at_start(architecture: Architecture, modules: Modules, tp: int, cut: int) -> int:
    """Bytes a token does not leave in the first layer, for under adapters no gradient goes past it."""
    parts = {"tp": tp, "sequence": cut}
    return sum(
        -(-tensor.bytes_per_token // parts[tensor.cut_by])
        for tensor in unsaved_in_first_layer(architecture, modules)
    )


@lru_cache(maxsize=4096)
def edge_activations(architecture: Architecture, modules: Modules) -> int:
    """Bytes a token leaves at the final norm, less the head's input."""
    hidden = architecture.hidden_size
    if modules.kernels == "liger":
        return liger_edge(architecture, modules)
    if architecture.norm == "layernorm":
        number = modules.compute if casts_norms(architecture, modules) else modules.normed
        return hidden * number + 2 * FP32
    normed = FP32 if family_of(architecture).scales_before_cast else modules.stream
    return hidden * FP32 + FP32 + hidden * normed * modules.trained


def head_input(architecture: Architecture, modules: Modules, loss: str = "full") -> int:
    """Bytes a token leaves in front of the head, whole also where the sequence is split before it.

    A fused loss keeps gradients instead (memory/activations/head.py), a chunked one what it starts from.
    """
    keeps = modules.trained or modules.keeps_frozen_inputs
    width = {"full": modules.compute * keeps, "chunked": modules.stream, "fused": 0}[loss]
    return architecture.hidden_size * width


@lru_cache(maxsize=4096)
def kept_by_selective(architecture: Architecture, moe: bool, modules: Modules) -> tuple[Saved, ...]:
    """Every tensor that one decoder layer keeps with ``recompute="selective"``."""
    if modules.kernels == "megatron":
        return tuple(megatron_selective(architecture, moe, modules))
    return tuple(selective_layer(architecture, moe, modules))


def _adapter_tensors(arch: Architecture, moe: bool, modules: Modules) -> list[Saved]:
    """The narrow numbers between an adapter's two matrices: the second one's input."""
    if modules.targets is None:
        return []
    linears = arch.layer_linears(first_layer(arch, moe))
    adapted = [(target, shape[1]) for target, shape in linears if target in modules.targets]
    narrow = len(adapted) * modules.adapter_rank * (FP32 if modules.int8_base else modules.compute)
    return [Saved("attention", narrow + _dropped_inputs(arch, modules, adapted), "sequence")]


def _dropped_inputs(arch: Architecture, modules: Modules, adapted: list[tuple[str, int]]) -> int:
    """What dropout before adapters adds: a mask each, and inputs that they no longer share.

    The mask is a byte a number on a GPU, on a CPU a number. Where inputs are cast, each adapter has one of
    its own anyway; what a norm or the MLP would keep for adapters alone gives way to the dropped copy.
    Adapters of an int8 base have an fp32 copy, dropped or not, beside what the base keeps.
    """
    if modules.int8_base:
        mask = modules.adapter_dropout * (1 if modules.on_gpu else FP32)
        # In an fp32 model there is nothing to cast: only what is dropped is another tensor.
        copied = FP32 * (modules.compute < FP32 or modules.adapter_dropout)
        return sum(inner for _, inner in adapted) * (copied + mask)
    if not modules.adapter_dropout:
        return 0
    c = modules.compute
    masks = sum(inner for _, inner in adapted) * (1 if modules.on_gpu else FP32 if modules.autocast else c)
    if modules.recasts or modules.normed > c:
        return masks
    copies = sum(inner for _, inner in adapted) * c
    if modules.keeps_frozen_inputs:
        return masks + copies
    for readers in stream_readers(arch):
        copies -= modules.stream_copies(*readers) * arch.hidden_size * c
    product = (names_of(arch).down, arch.intermediate_size)
    copies -= adapted.count(product) * arch.intermediate_size * c
    return masks + copies
