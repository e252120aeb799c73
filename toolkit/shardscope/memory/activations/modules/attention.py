"""Tensors saved by attention: its kernels (fused, masked, eager, SDPA's math backend), norms and latents."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.precision import FP32
from shardscope.families.registry import find_family
from shardscope.memory.activations.modules.saved_tensors import INT64, Modules, SavedTensor

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan


def is_eager(arch: Architecture, modules: Modules) -> bool:
    """Return whether attention runs as separate PyTorch operators (``attn_implementation="eager"``)."""
    return not find_family(arch).has_sdpa or modules.attention == "eager"


class Widths(NamedTuple):
    """Elements per token of each operand of the attention kernel."""

    query: int
    key: int
    value: int
    output: int

    @property
    def inputs(self) -> int:
        """Elements of query, key and value together."""
        return self.query + self.key + self.value


def get_attention_widths(arch: Architecture) -> Widths:
    """Return elements per token of the kernel's operands; grouped keys and values are narrower."""
    heads, latent = arch.num_attention_heads, arch.latent_attention
    if latent is not None:
        # DeepSeek-V2, section 2.1: training expands keys and values to all heads.
        query = heads * latent.qk_head_dim
        return Widths(query, query, heads * latent.v_head_dim, heads * latent.v_head_dim)
    kv = arch.num_key_value_heads * arch.head_dim
    return Widths(heads * arch.head_dim, kv, kv, heads * arch.head_dim)


@lru_cache(maxsize=1024)
def find_window_layers(num_layers: int, num_sliding: int) -> tuple[bool, ...]:
    """Return which layers have a sliding window: full-attention layers are spaced evenly between them."""
    full = num_layers - num_sliding
    return tuple(
        (index + 1) * full // num_layers == index * full // num_layers for index in range(num_layers)
    )


def list_windows(arch: Architecture, modules: Modules) -> tuple[bool | None, ...]:
    """Return the values of :attr:`Modules.windowed` for which layers save different tensors; (None,) if none.

    Only some layers have a sliding window, and so a mask (Gemma, OLMo 3).
    """
    if modules.windowed is not None or modules.kernels == "megatron" or is_eager(arch, modules):
        return (modules.windowed,)
    if not 0 < arch.sliding_window_layers < arch.num_hidden_layers:
        return (None,)
    with_mask, without_mask = (
        passes_mask(arch, modules._replace(windowed=windowed)) for windowed in (True, False)
    )
    return (None,) if with_mask == without_mask else (True, False)


def passes_mask(arch: Architecture, modules: Modules) -> bool:
    """Return whether transformers passes a mask, which the kernel saves.

    Some families always pass one; others only for packed documents, or for a sliding window shorter than the
    sequence.
    """
    if modules.masks_documents or find_family(arch).always_passes_mask:
        return True
    if modules.attention == "flash":
        # FlashAttention takes windows and packed documents as integer arguments, without a mask.
        return False
    windowed = bool(arch.sliding_window_layers) if modules.windowed is None else modules.windowed
    return bool(windowed and arch.sliding_window and modules.seq_len >= arch.sliding_window)


def compute_saved_scores(arch: Architecture, modules: Modules) -> int:
    """Return bytes of saved attention scores per query over all heads and keys; 0 with a fused kernel."""
    heads = arch.num_attention_heads
    each_key = heads * modules.seq_len
    if modules.kernels == "megatron":
        return 0
    cast = modules.compute if modules.compute < FP32 else 0
    if find_family(arch).has_attention_sinks:
        # The softmax over keys and sink, the index of each row's maximum, and autocast's copy.
        softmax = heads * (modules.seq_len + 1) * modules.stream
        return softmax + heads * INT64 + each_key * cast * (modules.stream > modules.compute)
    if is_eager(arch, modules):
        # The soft cap's tanh if any, the fp32 softmax, and its cast for the product with the values; with
        # dropout instead of the cast its mask, and the product of both.
        tanh = modules.compute if find_family(arch).has_softcapping else 0
        dropped = modules.compute + _get_dropout_mask_width(modules)
        return each_key * (tanh + FP32 + (dropped if modules.dropout else cast))
    if uses_math_backend(arch, modules):
        # The fp32 softmax; with dropout also its mask, and the product of both.
        mask = 1 if modules.on_gpu else FP32
        return each_key * (2 * FP32 + mask if modules.dropout else FP32)
    return 0


def _get_dropout_mask_width(modules: Modules) -> int:
    """Return bytes per element of a dropout mask: CUDA's kernel has booleans, the CPU's operators numbers."""
    return 1 if modules.on_gpu else modules.stream


def compute_scores_in_forward(arch: Architecture, modules: Modules, num_scores: int) -> int:
    """Return bytes of scores alive at once in forward, saved ones included."""
    c = modules.compute
    if find_family(arch).has_attention_sinks:
        # Scores with the mask, these without their maximum, and the softmax; and autocast's copy of it.
        return num_scores * (3 * modules.stream + c * (modules.stream > c))
    return num_scores * (c + FP32 + (c if find_family(arch).has_softcapping else 0) + (c if c < FP32 else 0))


def compute_scores_in_backward(arch: Architecture, modules: Modules, num_scores: int) -> int:
    """Return bytes of gradients of probabilities and softmax, less the freed cast of the probabilities."""
    if find_family(arch).has_attention_sinks:
        # The softmax's gradient, and its copy with the sink's column, to which the maximum's gradient is
        # added.
        return 2 * num_scores * modules.stream
    if modules.dropout:
        # The dropped probabilities are freed once their gradient exists. At the backward of the softmax, or
        # of dropout, whose mask is alive.
        mask = _get_dropout_mask_width(modules)
        in_backward = max(3 * FP32, FP32 + mask + 2 * modules.stream)
        return num_scores * (in_backward - FP32 - mask - modules.compute)
    return num_scores * (modules.compute + FP32)


def list_kernel_tensors(
    arch: Architecture, modules: Modules, output_projection: str = "o_proj"
) -> list[SavedTensor]:
    """Return the kernel's operands, statistics and output, and the output projection's input if copied."""
    c, heads, width = modules.compute, arch.num_attention_heads, get_attention_widths(arch)
    scores = compute_saved_scores(arch, modules)
    if scores:
        feeds = count_output_copies(arch, modules, output_projection) * width.output * c
        return [SavedTensor("attention", _compute_unfused_operands(arch, modules) + scores + feeds, "tp")]
    key, value = width.key, width.value
    has_mask = passes_mask(arch, modules)
    tensors = [SavedTensor("attention", FP32 * heads, "tp")]
    if find_family(arch).expands_key_heads:
        key, value = _count_expanded_operands(arch, modules)
    elif has_mask and width.key < width.query:
        # With a mask, SDPA needs as many key heads as query heads.
        key = value = width.query
    elif find_family(arch).values_are_views and not (modules.quantized and modules.normed > c):
        # A quantized base returns its input's dtype, which autocast then copies.
        value = width.query + 2 * width.key
    if has_mask and not modules.masks_documents:
        # SDPA converts a boolean mask to the operands' dtype, and so each layer saves one of its own
        # (ATen/native/transformers/attention.cpp, convert_boolean_attn_mask).
        tensors.append(SavedTensor("attention", modules.seq_len * c, "whole"))
    latent = arch.latent_attention
    if latent is not None:
        value = heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    tensors.append(SavedTensor("attention", (width.query + key + value + width.output) * c, "tp"))
    if count_output_copies(arch, modules, output_projection):
        tensors.append(SavedTensor("attention", width.output * c, "tp"))
    return tensors


def count_output_copies(arch: Architecture, modules: Modules, output_projection: str = "o_proj") -> int:
    """Return the saved copies of the output projection's input, besides what the kernel saves (0 or 1)."""
    is_output = not compute_saved_scores(arch, modules) and not _copies_output(arch, modules)
    return modules.inner_copies(output_projection, already_saved=is_output)


def _compute_unfused_operands(arch: Architecture, modules: Modules) -> int:
    """Return bytes of query, key and value of unfused attention.

    They are repeated to all heads (eager), or upcast to fp32 (SDPA's math backend).
    """
    width, c = get_attention_widths(arch), modules.compute
    if is_eager(arch, modules):
        return (width.query + 2 * arch.num_attention_heads * arch.head_dim) * c
    if arch.latent_attention is None and modules.dropout:
        return 3 * width.query * FP32
    if modules.broadcasts_views:
        return width.inputs * FP32
    repeats = find_family(arch).expands_key_heads or (modules.on_gpu and has_no_fused_kernel(arch, modules))
    if repeats and arch.latent_attention is None:
        return 3 * width.query * FP32
    return width.inputs * FP32


def _count_expanded_operands(arch: Architecture, modules: Modules) -> tuple[int, int]:
    """Return elements of saved key and value: repeated to all heads in newer Falcons, views in older ones.

    Values are a view of the fused output. With fp32 biases that is fp32 under autocast, and the kernel saves
    a copy.
    """
    query = get_attention_widths(arch).query
    repeated = arch.new_decoder_architecture or (modules.stream > modules.compute and arch.attention_bias)
    return query, query if repeated else 3 * query


def uses_math_backend(arch: Architecture, modules: Modules) -> bool:
    """Return whether SDPA falls back to its math backend.

    It does for a single key head that SDPA must broadcast (Falcon-7B). On a GPU, also if
    :func:`has_no_fused_kernel` is true; on CPU ranks, also with attention dropout, and if values are narrower
    than keys.
    """
    if has_one_key_head(arch):
        return True
    if modules.on_gpu:
        return has_no_fused_kernel(arch, modules)
    latent = arch.latent_attention
    return bool(modules.dropout) or (latent is not None and latent.qk_head_dim != latent.v_head_dim)


def is_unfused(arch: Architecture, modules: Modules) -> bool:
    """Return whether attention runs without a fused kernel, and so computes and stores every score."""
    if is_eager(arch, modules):
        return True
    return modules.kernels != "megatron" and uses_math_backend(arch, modules)


def has_one_key_head(arch: Architecture) -> bool:
    """Return whether SDPA must broadcast a single key head, as for older Falcons.

    Only its math backend can; from torch 2.14 on, so can its fused kernel for CPUs (``sdp_utils_cpp.h``,
    ``check_batch_size_and_num_heads_dense<supports_mqa>``).
    """
    broadcasts = find_family(arch).expands_key_heads and not arch.new_decoder_architecture
    return broadcasts and arch.num_key_value_heads < arch.num_attention_heads


def broadcasts_views(arch: Architecture, micro_batch_size: int) -> bool:
    """Return whether matmuls read a single key head in place, which needs micro-batch size 1.

    ``torch.matmul`` folds heads into the batch. The strides of ``expand`` allow that without a copy only for
    one sequence.
    """
    return has_one_key_head(arch) and micro_batch_size == 1


def _copies_output(arch: Architecture, modules: Modules) -> bool:
    """Return whether the output is copied to be contiguous for the projection.

    Flash attention lays out its output like the query. Families that build the query with ``cat`` have it
    head-major, while the projection needs token-major. The memory-efficient kernel, used with a mask or in
    fp32, returns token-major.
    """
    latent = arch.latent_attention
    if latent is not None:
        return latent.qk_head_dim == latent.v_head_dim
    if modules.joins_by_heads:
        return True
    flash = modules.fused_attention == "flash" and modules.compute < FP32
    by_tokens = modules.on_gpu and (passes_mask(arch, modules) or not flash)
    return find_family(arch).concatenates_query and not by_tokens


def find_fused_attention(plan: Plan) -> str:
    """Return the value of :attr:`Modules.fused_attention`: ``flash``, ``efficient`` or ``none``.

    Flash attention needs half precision and Ampere or later; before that, the memory-efficient kernel
    supports fp16 and fp32 (torch's ``sdp_utils.cpp``: ``check_sm_version``,
    ``less_than_sm80_mem_efficient_dtypes``).
    """
    if not plan.on_gpu or plan.cluster.gpu.has_flash_attention:
        return "flash"
    return "none" if plan.recipe.precision.startswith("bf16") else "efficient"


def resolve_attention(plan: Plan) -> str | None:
    """Return ``Recipe.attention``, or ``eager`` where Megatron-core's default has no fused kernel.

    Before Ampere, and in fp32, Transformer Engine has neither FlashAttention nor cuDNN's attention, and takes
    unfused operators by itself (2.8, attention/dot_product_attention/utils.py, ``get_attention_backend``:
    "Disabling FusedAttention for compute capability < sm80", "... for unsupported qkv_dtype").
    """
    recipe = plan.recipe
    if recipe.attention is None and plan.kernels == "megatron" and plan.on_gpu:
        is_fused = plan.cluster.gpu.has_flash_attention and recipe.precision != "fp32"
        return None if is_fused else "eager"
    return recipe.attention


def has_no_fused_kernel(arch: Architecture, modules: Modules) -> bool:
    """Return whether CUDA has no fused kernel for this attention.

    That is bf16 before Ampere; and grouped queries without a mask, in fp32 or before Ampere: flash attention
    is half precision, and the memory-efficient kernel has no grouped queries (torch's ``sdp_utils.cpp``,
    ``check_batch_size_and_num_heads_dense<supports_gqa=false>``).
    """
    if not find_family(arch).has_sdpa:
        return False
    if modules.fused_attention == "none":
        return True
    grouped = arch.latent_attention is None and arch.num_key_value_heads < arch.num_attention_heads
    needs_flash = modules.compute == FP32 or modules.fused_attention != "flash"
    return grouped and needs_flash and not passes_mask(arch, modules)


# ---- Norms and projections of queries, keys and values


def list_query_key_norms(arch: Architecture, modules: Modules) -> list[SavedTensor]:
    """Return the tensors saved by query and key norms, if the family has them."""
    if not arch.qk_norm:
        return []
    width, heads = get_attention_widths(arch), arch.num_attention_heads + arch.num_key_value_heads
    normed = FP32 if find_family(arch).scales_before_cast else modules.compute
    saved = (width.query + width.key) * (FP32 + normed * modules.trained)
    norms = 2 if find_family(arch).qk_norm_over_all_heads else heads
    return [SavedTensor("attention", saved + FP32 * norms, "tp")]


def list_latent_tensors(arch: Architecture, modules: Modules) -> list[SavedTensor]:
    """Return DeepSeek's compressed query and key-value: each normalized, then projected up."""
    ranks = list_latent_ranks(arch)
    if not ranks:
        return []
    c, saved = modules.compute, 0
    for rank, projection in ranks:
        normed = c * modules.trained + c * modules.inner_copies(projection)
        saved += rank * (FP32 + normed) + FP32
    latent = arch.latent_attention
    if latent is not None and c == FP32:
        # Without a cast the norm saves its input itself, a view of a projection that also has the keys'
        # rotated part (modeling_deepseek_v3.py, DeepseekV3Attention.forward: ``compressed_kv``).
        saved += latent.qk_rope_head_dim * FP32
    return [SavedTensor("attention", saved, "sequence")]


def list_latent_ranks(arch: Architecture) -> list[tuple[int, str]]:
    """Return the width of each latent, and the name of the projection that reads it."""
    latent = arch.latent_attention
    if latent is None:
        return []
    query = [(latent.q_lora_rank, "q_b_proj")] if latent.q_lora_rank else []
    return [*query, (latent.kv_lora_rank, "kv_b_proj")]
