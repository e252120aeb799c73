"""Saved tensors of Megatron-core's layer with Transformer Engine's fused kernels.

Reduces to Korthikanti et al. 2022 for a GPT layer with dropout: their 34 s b h, and 5 a s^2 b with eager
attention; fused attention saves one number per query and head instead (4 a s b). Checked tensor by tensor
against megatron-core's own modules on fake tensors (``frameworks/megatron/rehearsal/rehearse.py``).

With fp8, each matmul saves an 8-bit copy of its input: row-wise if sequence parallelism all-gathers it again,
otherwise only transposed (Blackwell: row-wise). Norms, attention and activation functions run in bf16 and
save the same tensors as in bf16. Read from Transformer Engine 2.20 (``pytorch/module/linear.py``,
``layernorm_linear.py``, ``grouped_linear.py``: tensors of ``save_for_backward``), never run here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.precision import FP32
from shardscope.memory.activations.modules.attention import get_attention_widths
from shardscope.memory.activations.modules.saved_tensors import Modules, SavedTensor, Sharding

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

INDEX = 8
"""Bytes of an index: PyTorch's are int64."""


def list_megatron_tensors(arch: Architecture, moe: bool, modules: Modules, tp: int = 1) -> list[SavedTensor]:
    """Return every tensor that the layer saves; ``tp`` decides which of them are views."""
    c, hidden = modules.compute, arch.hidden_size
    tensors = [
        # Each norm saves its input and its statistics; the outputs of two are inputs of matmuls.
        SavedTensor(
            "norms",
            arch.norms_per_layer * (hidden * c + compute_norm_statistics(arch))
            + _compute_norm_outputs(arch, moe, modules) * hidden,
            "sequence",
        ),
        *_list_attention(arch, modules, tp, selective=False),
        *list_core_attention(arch, modules, tp),
    ]
    if modules.dropout:
        # Dropout masks: one byte per element of each residual branch.
        tensors.append(SavedTensor("norms", 2 * hidden, "sequence"))
    if moe:
        return tensors + _list_experts(arch, modules)
    return [*tensors, SavedTensor("mlp", compute_inner_bytes(arch, modules) * arch.intermediate_size, "tp")]


def list_megatron_selective(
    arch: Architecture, moe: bool, modules: Modules, tp: int = 1
) -> list[SavedTensor]:
    """Return every tensor that the layer saves while its core attention is recomputed.

    The operands are saved as the checkpoint's inputs, the output as the projection's input (Korthikanti et
    al. 2022, section 5). With fused attention, little is saved and some memory is lost: the values are a
    view, through which the checkpoint keeps the whole output of the query-key-value projection
    (Megatron-LM#1225).
    """
    core = list_core_attention(arch, modules, tp)
    operands = _list_attention(arch, modules, tp, selective=False)
    kept = [
        tensor for tensor in list_megatron_tensors(arch, moe, modules, tp) if tensor not in (*core, *operands)
    ]
    return kept + _list_attention(arch, modules, tp, selective=True)


def list_core_attention(arch: Architecture, modules: Modules, tp: int = 1) -> list[SavedTensor]:
    """Return the tensors that the attention kernel saves besides its operands and output."""
    if modules.attention != "eager":
        return [SavedTensor("attention", FP32 * arch.num_attention_heads, "tp")]
    tensors = [build_eager_scores(arch, modules)]
    if repeats_heads(arch, tp):
        # Keys and values are repeated to all heads (dot_product_attention.py, repeat_interleave).
        more = arch.num_attention_heads - max(tp, arch.num_key_value_heads)
        tensors.append(SavedTensor("attention", 2 * more * arch.head_dim * modules.compute, "tp"))
    return tensors


def repeats_heads(arch: Architecture, tp: int) -> bool:
    """Return whether a rank of ``tp`` has fewer key/value heads than query heads."""
    return arch.latent_attention is None and arch.num_attention_heads > max(tp, arch.num_key_value_heads)


def copies_query(arch: Architecture, tp: int) -> bool:
    """Return whether queries are copied out of the fused projection's output.

    They are if a rank has several groups of several heads (attention.py, get_query_key_value_tensors,
    ``query.reshape``).
    """
    return repeats_heads(arch, tp) and arch.num_key_value_heads > tp


def list_fused_projection(arch: Architecture, modules: Modules, tp: int) -> list[SavedTensor]:
    """Return the output of the query-key-value projection: one tensor, of which each operand is a view.

    If tp exceeds the number of key/value heads, it is all-gathered, and each rank's operands are views of the
    whole (attention.py, get_query_key_value_tensors).
    """
    width, c = get_attention_widths(arch), modules.compute
    if tp > arch.num_key_value_heads:
        return [SavedTensor("attention", (width.query + width.key + width.value) * c, "whole")]
    return [SavedTensor("attention", (width.query + width.key + width.value) * c, "tp")]


def build_eager_scores(arch: Architecture, modules: Modules) -> SavedTensor:
    """Return eager attention's softmax; with dropout also its one-byte mask and the product of both.

    Korthikanti et al. 2022, eq. 1.
    """
    each = modules.compute + (1 + modules.compute if modules.dropout else 0)
    return SavedTensor("attention", arch.num_attention_heads * modules.seq_len * each, "tp")


def compute_norm_statistics(arch: Architecture) -> int:
    """Return bytes per token of one norm's saved statistics: 1/rms, or mean and 1/std."""
    return FP32 * (1 if arch.norm == "rmsnorm" else 2)


def count_branches(arch: Architecture) -> int:
    """Return the number of the MLP's up projections."""
    return 2 if arch.gated_mlp else 1


def get_matmul_input_width(modules: Modules) -> int:
    """Return bytes saved per element of a matmul's input."""
    return 1 if modules.eight_bit_inputs else modules.compute


def compute_inner_bytes(arch: Architecture, modules: Modules) -> int:
    """Return bytes saved per element between an MLP's two matmuls.

    The fused activation saves its input (both branches if gated), the second matmul its input.
    """
    return count_branches(arch) * modules.compute + get_matmul_input_width(modules)


def _compute_norm_outputs(arch: Architecture, moe: bool, modules: Modules) -> int:
    """Return bytes saved per element of the outputs of the norms before attention and MLP."""
    if not modules.eight_bit_inputs:
        return 2 * modules.compute
    # Latent attention has two projections that read it, each with a copy (multi_latent_attention.py).
    before_attention = 2 if arch.latent_attention is not None else 1
    if not moe or arch.mixture_of_experts is None:
        return before_attention + 1
    # The router saves it uncast, and shared experts a copy: with delayed scaling they cannot share
    # (shared_experts.py and linear.py, save_original_input).
    shared = arch.mixture_of_experts.shared_expert_intermediate_size > 0
    return before_attention + modules.compute + shared


def _compute_attention_output(modules: Modules, selective: bool) -> int:
    """Return bytes saved per element of attention's output, by its fused kernel and by the projection.

    In bf16, that is one tensor. In fp8 with delayed scaling, the projection cannot quantize it again in
    backward, and saves a copy (attention.py and linear.py, ``save_original_input``). Eager and recomputed
    attention save no output.
    """
    if not modules.eight_bit_inputs:
        return modules.compute
    fused = modules.attention != "eager" and not selective
    return 1 + fused * modules.compute


def _list_attention(arch: Architecture, modules: Modules, tp: int, *, selective: bool) -> list[SavedTensor]:
    """Return the core attention's operands and output, and the tensors saved by the projections before it."""
    width, latent, c = get_attention_widths(arch), arch.latent_attention, modules.compute
    output = _compute_attention_output(modules, selective)
    if latent is not None:
        return _list_latent_attention(arch, modules, output)
    # If tp exceeds the number of key/value heads, each rank has one of them.
    shared: Sharding = "key_value_heads"
    rotates = arch.position_embedding == "rope"
    # A fused kernel copies its operands. A checkpoint, and a matmul with values that are not repeated, keep a
    # view, and so the whole projection output.
    views = selective or (modules.attention == "eager" and not repeats_heads(arch, tp))
    tensors = [SavedTensor("attention", width.output * output, "tp")]
    if rotates or not views:
        tensors += [
            SavedTensor("attention", width.query * c, "tp"),
            SavedTensor("attention", width.key * c, shared),
        ]
    if not views:
        tensors.append(SavedTensor("attention", width.value * c, shared))
    if views or arch.qk_norm:
        # The norms save their inputs, which are views too.
        tensors += list_fused_projection(arch, modules, tp)
    if arch.qk_norm:
        heads = arch.num_attention_heads
        copied = copies_query(arch, tp) * width.query * c
        tensors.append(SavedTensor("attention", copied + heads * compute_norm_statistics(arch), "tp"))
        tensors.append(
            SavedTensor("attention", arch.num_key_value_heads * compute_norm_statistics(arch), shared)
        )
    return tensors


def _list_latent_attention(arch: Architecture, modules: Modules, output: int) -> list[SavedTensor]:
    """Return DeepSeek's operands and output, and its latents before and after their norms.

    The latents are replicated over tp, or sharded with sequence parallelism. :func:`compute_latent_angles`
    is separate, because angles do not grow with micro-batches.
    """
    latent, width, c = arch.latent_attention, get_attention_widths(arch), modules.compute
    assert latent is not None
    query = latent.q_lora_rank or 0
    norms = compute_norm_statistics(arch) * (2 if query else 1)
    compressed = (query + latent.kv_lora_rank) * (
        c + get_matmul_input_width(modules)
    ) + latent.qk_rope_head_dim * c
    return [
        SavedTensor("attention", (width.query + width.key + width.value) * c + width.output * output, "tp"),
        SavedTensor("attention", compressed + norms, "sequence"),
    ]


def compute_latent_angles(arch: Architecture, modules: Modules) -> int:
    """Return bytes per position, for all sequences of a micro-batch, of latent attention's sines and cosines.

    Each layer computes them from the angles anew, for queries and for keys (rope_utils.py).
    """
    latent = arch.latent_attention
    return 0 if latent is None else 4 * latent.qk_rope_head_dim * modules.compute


def _list_experts(arch: Architecture, modules: Modules) -> list[SavedTensor]:
    """Return tokens by expert, the inputs of both matmuls, and the router's saved tensors."""
    experts, c = arch.mixture_of_experts, modules.compute
    assert experts is not None
    top_k, copies = experts.num_experts_per_tok, compute_inner_bytes(arch, modules)
    routed = top_k * experts.moe_intermediate_size * copies
    # Masks, probabilities, the top k and their indices, and both permutations of the sorted tokens.
    router = experts.num_experts * (1 + c) + top_k * (INDEX + FP32 + 2 * INDEX)
    load = modules.expert_load
    return [
        SavedTensor(
            "experts",
            _scale_by_load(top_k * (arch.hidden_size * get_matmul_input_width(modules) + c), load),
            "expert_tokens",
        ),
        SavedTensor("experts", _scale_by_load(routed, load), "tp"),
        SavedTensor("experts", copies * experts.shared_expert_intermediate_size, "tp"),
        SavedTensor("experts", router, "sequence"),
    ]


def _scale_by_load(num_bytes: int, load: float) -> int:
    """Return bytes on the most loaded rank, whose experts get ``load`` times their even share."""
    return num_bytes if load == 1 else round(num_bytes * load)
