"""Activations that forward saves for backward on one rank: the modules' lists, sharded and recomputed.

Each entry of the lists in ``modules/`` is one tensor kept by autograd. They are tested against what
transformers' modules actually save (tests/runs/test_saved_tensors.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.errors import refuse
from shardscope.core.ops import all_true, ceil_div
from shardscope.core.precision import FP32, widths
from shardscope.families.parameter_names import list_parameter_names
from shardscope.families.parameter_shapes import find_first_layer
from shardscope.families.registry import FAMILIES, find_family
from shardscope.memory.activations.modules.attention import (
    broadcasts_views,
    count_output_copies,
    find_fused_attention,
    find_window_layers,
    get_attention_widths,
    is_eager,
    list_kernel_tensors,
    list_latent_ranks,
    list_latent_tensors,
    list_query_key_norms,
    list_windows,
    passes_mask,
    resolve_attention,
)
from shardscope.memory.activations.modules.compiled_layers import (
    compute_compiled_recomputation,
    list_compiled_tensors,
)
from shardscope.memory.activations.modules.dora import list_dora_tensors
from shardscope.memory.activations.modules.experts import list_expert_tensors
from shardscope.memory.activations.modules.first_layer import list_unsaved_in_first_layer
from shardscope.memory.activations.modules.gpt2 import list_gpt2_tensors
from shardscope.memory.activations.modules.layernorm import (
    casts_norms,
    list_layernorm_tensors,
    upcasts_norms,
)
from shardscope.memory.activations.modules.liger import list_liger_tensors
from shardscope.memory.activations.modules.megatron import list_megatron_selective, list_megatron_tensors
from shardscope.memory.activations.modules.saved_tensors import (
    INT64,
    Modules,
    SavedTensor,
    list_stream_readers,
)
from shardscope.memory.activations.modules.selective_recompute import (
    compute_int8_inputs,
    list_selective_tensors,
)
from shardscope.memory.state.lora import find_adapter_targets

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan


class LayerActivations(NamedTuple):
    """Bytes per token of one layer on one rank."""

    norms: int
    attention: int
    mlp: int
    saved: int
    """Bytes kept until this layer's backward, recomputation considered."""
    offloaded: int
    """Bytes kept in host memory instead."""
    recomputed: int
    """Bytes that backward recomputes or fetches before the layer's backward starts."""


MASK_ALIGNMENT = 8
"""Number of which the rows of a document mask have a multiple: CUDA's memory-efficient kernel would copy any
other mask in each layer (ATen/native/transformers/attention.cpp, preprocess_mask)."""

FAMILIES_WITH_ACTIVATIONS = frozenset(FAMILIES)
"""Families tested tensor by tensor against transformers' modules (tests/runs/test_saved_tensors.py)."""


def check_known(arch: Architecture) -> None:
    """Raise ``ValueError`` if the saved tensors of the family's modules are not listed."""
    if arch.model_type not in FAMILIES_WITH_ACTIVATIONS:
        refuse(
            "Architecture.model_type",
            arch.model_type,
            f"a family whose activations are known: {', '.join(sorted(FAMILIES_WITH_ACTIVATIONS))}",
            "plan.rehearse(), which runs the family's own modules on fake tensors",
        )
    if arch.position_embedding == "alibi":
        refuse(
            "Architecture.position_embedding",
            "alibi",
            "rope or learned; the memory of alibi's mask of biases for each head is not known",
            "plan.rehearse(), which runs the family's own modules on fake tensors",
        )


def find_modules(plan: Plan) -> Modules:
    """Return the modules that a plan runs. Raise ``ValueError`` for a family with unknown activations."""
    check_known(plan.architecture)
    recipe = plan.recipe
    lora = recipe.has_adapters
    autocast = plan.layout.mixes_by_autocast and recipe.precision.endswith("mixed")
    # DeepSpeed's ZeRO-3 replaces torch.nn.functional.linear, but not explicit matmuls.
    uses_linear = find_family(plan.architecture).projections == "linear"
    return Modules(
        kernels=plan.kernels,
        autocast=autocast,
        compute=widths[recipe.precision].compute,
        seq_len=recipe.seq_len,
        targets=find_adapter_targets(plan.architecture, recipe) if lora else None,
        adapter_rank=recipe.adapter_rank if lora else 0,
        adapter_dropout=lora and recipe.lora_dropout > 0,
        uses_dora=recipe.use_dora,
        on_gpu=plan.on_gpu,
        dropout=recipe.dropout,
        attention=resolve_attention(plan),
        fused_attention=find_fused_attention(plan),
        broadcasts_views=all_true(broadcasts_views(plan.architecture, recipe.micro_batch_size)),
        expert_load=recipe.expert_capacity_factor or recipe.expert_imbalance,
        quantized=recipe.base_quantization is not None,
        int8_base=recipe.base_quantization == "int8",
        eight_bit_inputs=recipe.precision == "fp8-mixed" and plan.kernels == "megatron",
        upcasts_norms=autocast and plan.on_gpu and upcasts_norms(plan.architecture),
        keeps_frozen_inputs=lora and plan.layout.keeps_frozen_inputs and uses_linear,
        masks_documents=recipe.packing and recipe.attention != "flash",
    )


@lru_cache(maxsize=4096)
def compute_layer_activations(
    architecture: Architecture,
    moe: bool,
    modules: Modules,
    recompute: str,
    tp: int,
    num_stream_shards: int,
    joins: int = 0,
) -> LayerActivations:
    """Return the bytes per token of one decoder layer; the residual stream has ``num_stream_shards`` shards.

    ``joins`` is 1 if attention's output is concatenated from sequence chunks in head-major layout.

    If only some layers have a sliding window, the result is the mean of both kinds, rounded up: exact for the
    sum over all layers. ``recomputed`` is the maximum of both kinds.
    """
    if joins:
        modules = modules._replace(joins_by_heads=True)
    windows = list_windows(architecture, modules)
    if len(windows) > 1:
        with_window, without_window = (
            compute_layer_activations(
                architecture, moe, modules.with_window(windowed), recompute, tp, num_stream_shards
            )
            for windowed in windows
        )
        return _average_windows(architecture, with_window, without_window)
    # All that autograd saves on this rank.
    tensors = list_saved_tensors(architecture, moe, modules)
    # A rank has at least one key/value head, so more ranks than such heads share them.
    num_shards = {
        "tp": tp,
        "key_value_heads": min(tp, architecture.num_key_value_heads),
        "sequence": num_stream_shards,
        "whole": 1,
    }

    def sum_on_rank(tensors: tuple[SavedTensor, ...], *operators: str) -> int:
        return sum(
            ceil_div(tensor.bytes_per_token, num_shards[tensor.cut_by])
            for tensor in tensors
            if not operators or tensor.operator in operators
        )

    all_saved = sum_on_rank(tensors)
    # What of it stays until backward. torch.utils.checkpoint saves a layer's arguments: the residual stream.
    stream = ceil_div(architecture.hidden_size * modules.stream, num_stream_shards)
    kept_bytes = all_saved
    if recompute == "full":
        kept_bytes = stream
    elif recompute == "selective":
        kept_bytes = sum_on_rank(list_kept_by_selective(architecture, moe, modules))
    elif recompute == "offload" and modules.on_gpu:
        # On a CPU rank nothing is freed: the offloaded tensors stay in the same memory.
        kept_bytes = 0
    if modules.int8_base:
        kept_bytes += compute_int8_inputs(architecture, moe, modules, recompute)
    kept_inputs = compute_kept_for_recomputation(architecture, moe, modules, recompute, stream)
    return LayerActivations(
        norms=sum_on_rank(tensors, "norms"),
        attention=sum_on_rank(tensors, "attention"),
        mlp=sum_on_rank(tensors, "mlp", "experts"),
        saved=kept_bytes,
        offloaded=all_saved if kept_bytes == 0 else 0,
        # Backward recreates all of a layer's saved tensors before it uses the first one.
        recomputed=max(0, all_saved + kept_inputs - kept_bytes),
    )


def _average_windows(
    arch: Architecture, with_window: LayerActivations, without_window: LayerActivations
) -> LayerActivations:
    """Return the mean of layers with and without a sliding window, weighted by their numbers."""
    # Callers multiply by the number of layers: the mean makes that product the sum over both kinds.
    layers, sliding = arch.num_hidden_layers, arch.sliding_window_layers
    mean = LayerActivations(*(
        ceil_div(sliding * one + (layers - sliding) * other, layers)
        for one, other in zip(with_window, without_window, strict=True)
    ))  # fmt: skip
    # Only one layer at a time is recomputed, so this is a maximum and no sum.
    return mean._replace(recomputed=max(with_window.recomputed, without_window.recomputed))


def compute_kept_for_recomputation(
    arch: Architecture, moe: bool, modules: Modules, recompute: str, stream: int
) -> int:
    """Return bytes per token kept by recomputation that the recomputed layer does not save itself.

    These are the layer's input, if its first norm saves a copy in another dtype instead; and the last
    matmul's output, which is not recomputed: recomputation stops when autograd has all saved tensors
    (torch.utils.checkpoint's early stop), unless a norm after it saves it.
    For ``compiled`` kernels see :func:`compute_compiled_recomputation`.
    """
    if recompute not in ("full", "selective"):
        return 0
    if modules.kernels == "compiled":
        return compute_compiled_recomputation(arch, modules)
    # RMSNorm's ``hidden_states.to(float32)`` saves a copy of a half-precision input, not the input itself.
    casts = arch.norm == "rmsnorm" and modules.kernels == "transformers" and modules.stream < FP32
    casts = casts or modules.normed > modules.stream
    casts = casts or (casts_norms(arch, modules) and modules.stream > modules.compute)
    if find_family(arch).is_post_norm:  # projections read the input without a norm
        casts = modules.stream > modules.compute or modules.recasts
    kept_bytes = stream if casts else 0
    # "selective" saves the outputs of matmuls, so that of the last one, too: the down projection, unless the
    # layer ends with routed experts or a norm.
    experts = arch.mixture_of_experts
    ends_dense = not moe or experts is None or experts.shared_expert_intermediate_size > 0
    only_before = arch.norms_per_layer <= 2 and not find_family(arch).is_post_norm
    if recompute == "selective" and ends_dense and only_before:
        kept_bytes += arch.hidden_size * modules.compute
    if modules.int8_base:
        kept_bytes += compute_int8_inputs(arch, moe, modules, recompute)
    return kept_bytes


@lru_cache(maxsize=4096)
def list_saved_tensors(architecture: Architecture, moe: bool, modules: Modules) -> tuple[SavedTensor, ...]:
    """Return every tensor that one decoder layer saves with ``recompute="none"``."""
    if modules.kernels == "megatron":
        return tuple(list_megatron_tensors(architecture, moe, modules))
    if modules.kernels == "liger":
        tensors = list_liger_tensors(architecture, modules)
    elif modules.kernels == "compiled":
        tensors = list_compiled_tensors(architecture, modules)
    elif find_family(architecture).projections == "conv1d":
        tensors = list_gpt2_tensors(architecture, modules)
    elif architecture.norm == "layernorm":
        tensors = list_layernorm_tensors(architecture, modules)
    else:
        tensors = _list_rmsnorm_tensors(architecture, moe, modules)
    return (
        *tensors,
        *_list_adapter_tensors(architecture, moe, modules),
        *list_dora_tensors(architecture, moe, modules),
        *_list_wide_branches(architecture, modules),
    )


def _list_rmsnorm_tensors(arch: Architecture, moe: bool, modules: Modules) -> list[SavedTensor]:
    """Return every tensor that an RMSNorm layer of transformers saves: Llama, Qwen, Gemma, DeepSeek, ..."""
    c, hidden = modules.compute, arch.hidden_size
    attention_readers, mlp_readers = list_stream_readers(arch)
    tensors = [
        SavedTensor("norms", _compute_norms(arch, modules), "sequence"),
        SavedTensor("norms", modules.stream_copies(*attention_readers) * hidden * c, "whole"),
        *list_kernel_tensors(arch, modules),
        *list_query_key_norms(arch, modules),
        *list_latent_tensors(arch, modules),
    ]
    if moe:
        return tensors + list_expert_tensors(arch, modules)
    tensors.append(SavedTensor("norms", modules.stream_copies(*mlp_readers) * hidden * c, "whole"))
    tensors.append(SavedTensor("mlp", count_mlp_copies(arch, modules) * arch.intermediate_size * c, "tp"))
    return tensors


def _compute_norms(arch: Architecture, modules: Modules) -> int:
    """Return bytes saved by RMSNorms: fp32 input, 1/rms and, for the weight's gradient, normalized input."""
    hidden, count = arch.hidden_size, arch.norms_per_layer
    # transformers' LlamaRMSNorm (5.23, modeling_llama.py): ``pow`` and the product with 1/rms save the fp32
    # input, and ``self.weight * normed`` saves the normalized input if the weight is trained.
    saved = count * (hidden * FP32 + FP32)
    if not modules.trained:
        return saved
    if find_family(arch).scales_before_cast:
        # Gemma multiplies by the weight in fp32, and casts the product.
        return saved + count * hidden * FP32
    # Norms after a projection (GLM-4) cast back to its output's dtype.
    behind = count - 2 if count > 2 else 0
    return saved + hidden * ((count - behind) * modules.stream + behind * modules.compute)


def count_mlp_copies(arch: Architecture, modules: Modules) -> int:
    """Return how many intermediate-size tensors the MLP saves.

    Gate, silu(gate) and up, or the activation's input; and the product.
    """
    return (3 if arch.gated_mlp else 1) + modules.inner_copies("down_proj")


def count_inner_gradients(arch: Architecture, modules: Modules) -> int:
    """Return how many intermediate-size gradients are alive at once, less the freed saved product."""
    if not arch.gated_mlp:
        product = modules.inner_copies(list_parameter_names(arch).down)
        activation = find_family(arch).activation
        # CUDA's autocast computes powers in fp32.
        has_fp32_power = modules.autocast and modules.on_gpu
        if activation == "gelu_new":
            # The cube, and so the gradients of both factors.
            return (6 if has_fp32_power else 3) - product
        if activation == "relu2":
            # The gradient of the output, the input, twice the input, and the gradient of the input.
            return (8 if has_fp32_power else 4) - product
        # One kernel: the gradients of its output and input.
        return 2 - product
    if modules.kernels == "liger":
        # Both branches' gradients overwrite the branches (liger-kernel, ops/swiglu.py).
        return 1
    if modules.kernels == "compiled":
        # One kernel computes both branches' gradients, and one of them overwrites its branch: buffers donated
        # to a compiled backward are reused (torch/_inductor/ir.py, DonatedBuffer).
        return 1 if modules.inner_copies("down_proj") else 2
    return 2 if modules.inner_copies("down_proj") else 3


def _list_wide_branches(arch: Architecture, modules: Modules) -> list[SavedTensor]:
    """Return the extra bytes of a quantized MLP under autocast: its outputs have the norm's wider dtype."""
    if not (modules.quantized and modules.autocast):
        return []
    branches = 3 if arch.gated_mlp else 1
    return [SavedTensor("mlp", branches * arch.intermediate_size * (modules.normed - modules.compute), "tp")]


@lru_cache(maxsize=4096)
def compute_kept_masks(
    architecture: Architecture, modules: Modules, recompute: str, interval: int = 1
) -> int:
    """Return the bytes per token of attention masks kept as inputs of recomputed layers, once for all layers.

    One mask for layers with a window and one for those without, if any recomputed layer uses it
    (transformers/masking_utils.py): numbers with eager attention, booleans with SDPA, which needs no mask for
    plain causal attention.
    """
    if recompute not in ("full", "selective") or modules.kernels == "megatron" or modules.masks_documents:
        return 0
    # The mask is an argument of every layer, so checkpoint keeps it with the layer's input. The layers of a
    # kind share one mask.
    windows = find_window_layers(architecture.num_hidden_layers, architecture.sliding_window_layers)
    recomputed = windows[::interval]
    if is_eager(architecture, modules):
        return len(set(recomputed)) * modules.seq_len * modules.stream
    needed = any(recomputed) or not any(windows)  # Falcon needs one without windows
    return modules.seq_len if needed and passes_mask(architecture, modules) else 0


def compute_document_mask(architecture: Architecture, modules: Modules) -> int:
    """Return the bytes per token of the mask that separates packed documents, once for all layers.

    One number per query and key, in rows of a multiple of 8 (training/document_masks.py). An additive mask in
    the compute dtype is neither converted by SDPA nor cast by autocast, so every layer saves the same tensor.
    Also counted: the position ids, and with rotary positions the tables of cosines and sines, which have a
    row for each token (transformers, LlamaRotaryEmbedding.forward).
    """
    if not modules.masks_documents:
        return 0
    latent = architecture.latent_attention
    rotated = architecture.head_dim if latent is None else latent.qk_rope_head_dim
    tables = 2 * rotated * modules.stream if architecture.position_embedding == "rope" else 0
    return ceil_div(modules.seq_len, MASK_ALIGNMENT) * MASK_ALIGNMENT * modules.compute + INT64 + tables


@lru_cache(maxsize=4096)
def compute_unsaved_at_start(
    architecture: Architecture, modules: Modules, tp: int, num_stream_shards: int
) -> int:
    """Return the bytes per token that the first layer does not save under adapters: no gradient passes it."""
    num_shards = {"tp": tp, "sequence": num_stream_shards}
    return sum(
        ceil_div(tensor.bytes_per_token, num_shards[tensor.cut_by])
        for tensor in list_unsaved_in_first_layer(architecture, modules)
    )


@lru_cache(maxsize=4096)
def list_kept_by_selective(
    architecture: Architecture, moe: bool, modules: Modules
) -> tuple[SavedTensor, ...]:
    """Return every tensor that one decoder layer keeps with ``recompute="selective"``."""
    if modules.kernels == "megatron":
        return tuple(list_megatron_selective(architecture, moe, modules))
    return tuple(list_selective_tensors(architecture, moe, modules))


def _list_adapter_tensors(arch: Architecture, moe: bool, modules: Modules) -> list[SavedTensor]:
    """Return the saved inputs of the adapters' second matrices, and what adapter dropout adds."""
    if modules.targets is None:
        return []
    linears = arch.layer_linears(find_first_layer(arch, moe))
    adapted = [(target, shape[1]) for target, shape in linears if target in modules.targets]
    narrow = len(adapted) * modules.adapter_rank * (FP32 if modules.int8_base else modules.compute)
    return [
        SavedTensor("attention", narrow + _compute_dropped_inputs(arch, moe, modules, adapted), "sequence")
    ]


def _compute_dropped_inputs(
    arch: Architecture, moe: bool, modules: Modules, adapted: list[tuple[str, int]]
) -> int:
    """Return the bytes per token added by dropout before adapters: masks, and inputs no longer shared.

    A mask takes a byte per element on a GPU, a full number on a CPU. If inputs are cast, each adapter has its
    own copy anyway. Else tensors that would be saved only for adapters are replaced by the dropped copies.
    Adapters on an int8 base have an fp32 copy, with or without dropout, in addition to the base's own
    input.
    """
    if modules.int8_base:
        mask = modules.adapter_dropout * (1 if modules.on_gpu else FP32)
        # An fp32 model needs no cast: only dropout creates another tensor.
        copied = FP32 * (modules.compute < FP32 or modules.adapter_dropout)
        return sum(inner for _, inner in adapted) * (copied + mask)
    if not modules.adapter_dropout:
        return 0
    c = modules.compute
    # native_dropout saves a boolean mask on a GPU; on a CPU dropout multiplies by a mask of numbers.
    masks = sum(inner for _, inner in adapted) * (1 if modules.on_gpu else FP32 if modules.autocast else c)
    if modules.recasts or modules.normed > c:
        return masks
    copies = sum(inner for _, inner in adapted) * c
    if modules.keeps_frozen_inputs:
        return masks + copies
    return masks + copies - _compute_replaced_inputs(arch, moe, modules, adapted)


def _compute_replaced_inputs(
    arch: Architecture, moe: bool, modules: Modules, adapted: list[tuple[str, int]]
) -> int:
    """Return the bytes per token that the lists of ``modules/`` have for adapters alone.

    With dropout, each adapter saves a dropped copy instead.
    """
    attention, mlp = list_stream_readers(arch)
    readers = [(*attention, *mlp)] if arch.norms_per_layer == 1 else [attention, mlp]
    replaced = sum(modules.stream_copies(*names) for names in readers) * arch.hidden_size
    names, experts = list_parameter_names(arch), arch.mixture_of_experts
    product = experts.shared_expert_intermediate_size if moe and experts else arch.intermediate_size
    replaced += adapted.count((names.down, product)) * product
    replaced += count_output_copies(arch, modules, names.output) * get_attention_widths(arch).output
    for rank, projection in list_latent_ranks(arch):
        replaced += modules.inner_copies(projection) * rank
    return replaced * modules.compute
