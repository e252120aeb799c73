"""What Megatron-core's layer keeps for backward, with Transformer Engine's fused kernels.

Reduces to Korthikanti et al. 2022 for a GPT layer with dropout: their 34 s b h, and 5 a s^2 b where attention
is eager; fused attention keeps one number a query and head instead (4 a s b). Counted tensor by tensor
against megatron-core's own modules on fake tensors (``frameworks/megatron/rehearsal/rehearse.py``).

With fp8, each product keeps a copy of its input in 8 bits: row-wise where sequence parallelism gathers it
again, or else only transposed (Blackwell: row-wise). Norms, attention and activation functions work in bf16
and keep what they keep in bf16. Read from Transformer Engine 2.20 (``pytorch/module/linear.py``,
``layernorm_linear.py``, ``grouped_linear.py``: tensors of ``save_for_backward``) and never run here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.precision import FP32
from shardscope.memory.activations.modules.attention import widths
from shardscope.memory.activations.modules.saved import Cut, Modules, Saved

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

INDEX = 8
"""Bytes of an index: PyTorch's are int64."""


def megatron_layer(arch: Architecture, moe: bool, modules: Modules, tp: int = 1) -> list[Saved]:
    """Every tensor that the layer saves; ``tp`` decides which of them are views."""
    c, hidden = modules.compute, arch.hidden_size
    tensors = [
        # Each norm keeps its input and its statistics; the outputs of two feed matrix products.
        Saved(
            "norms",
            arch.norms_per_layer * (hidden * c + norm_statistics(arch))
            + _norm_outputs(arch, moe, modules) * hidden,
            "sequence",
        ),
        *_attention(arch, modules, tp, selective=False),
        *core_attention(arch, modules, tp),
    ]
    if modules.dropout:
        # One byte a number of each residual branch.
        tensors.append(Saved("norms", 2 * hidden, "sequence"))
    if moe:
        return tensors + _experts(arch, modules)
    return [*tensors, Saved("mlp", inner_copies(arch, modules) * arch.intermediate_size, "tp")]


def megatron_selective(arch: Architecture, moe: bool, modules: Modules, tp: int = 1) -> list[Saved]:
    """Every tensor that the layer saves while its core attention is recomputed.

    The operands stay as the checkpoint's inputs, the output as the projection's (Korthikanti et al. 2022,
    section 5). With fused attention little is won, and some is lost: the values are a view, by which the
    checkpoint holds the whole output of the query-key-value product (Megatron-LM#1225).
    """
    core = core_attention(arch, modules, tp)
    operands = _attention(arch, modules, tp, selective=False)
    kept = [tensor for tensor in megatron_layer(arch, moe, modules, tp) if tensor not in (*core, *operands)]
    return kept + _attention(arch, modules, tp, selective=True)


def core_attention(arch: Architecture, modules: Modules, tp: int = 1) -> list[Saved]:
    """What the attention kernel keeps beside its operands and its output."""
    if modules.attention != "eager":
        return [Saved("attention", FP32 * arch.num_attention_heads, "tp")]
    found = [attention_scores(arch, modules)]
    if repeats_heads(arch, tp):
        # Keys and values are repeated to all heads (dot_product_attention.py, repeat_interleave).
        more = arch.num_attention_heads - max(tp, arch.num_key_value_heads)
        found.append(Saved("attention", 2 * more * arch.head_dim * modules.compute, "tp"))
    return found


def repeats_heads(arch: Architecture, tp: int) -> bool:
    """Whether a rank of ``tp`` has fewer heads of keys and values than of queries."""
    return arch.latent_attention is None and arch.num_attention_heads > max(tp, arch.num_key_value_heads)


def copies_query(arch: Architecture, tp: int) -> bool:
    """Whether queries are copied out of their product: from several groups of several heads each
    (attention.py, get_query_key_value_tensors, ``query.reshape``)."""
    return repeats_heads(arch, tp) and arch.num_key_value_heads > tp


def fused_product(arch: Architecture, modules: Modules, tp: int) -> list[Saved]:
    """The product of queries, keys and values: one tensor, of which each is a view.

    Where tp exceeds the key/value heads it is gathered, and each rank looks at its part of the whole
    (attention.py, get_query_key_value_tensors).
    """
    width, c = widths(arch), modules.compute
    if tp > arch.num_key_value_heads:
        return [Saved("attention", (width.query + width.key + width.value) * c, "whole")]
    return [Saved("attention", (width.query + width.key + width.value) * c, "tp")]


def attention_scores(arch: Architecture, modules: Modules) -> Saved:
    """Eager attention's softmax; with dropout its mask of one byte and the product of both.

    Korthikanti et al. 2022, eq. 1.
    """
    each = modules.compute + (1 + modules.compute if modules.dropout else 0)
    return Saved("attention", arch.num_attention_heads * modules.seq_len * each, "tp")


def norm_statistics(arch: Architecture) -> int:
    """Bytes a token of what one norm keeps beside its input: 1 / rms, or the mean too."""
    return FP32 * (1 if arch.norm == "rmsnorm" else 2)


def branches(arch: Architecture) -> int:
    """Up projections of the MLP."""
    return 2 if arch.gated_mlp else 1


def product_input(modules: Modules) -> int:
    """Bytes that a product keeps of each number of its input."""
    return 1 if modules.eight_bit_inputs else modules.compute


def inner_copies(arch: Architecture, modules: Modules) -> int:
    """Bytes kept of each number between an MLP's two products.

    The fused activation keeps its input (both branches if gated), the second product its input.
    """
    return branches(arch) * modules.compute + product_input(modules)


def _norm_outputs(arch: Architecture, moe: bool, modules: Modules) -> int:
    """Bytes kept of each number that the norms before attention and MLP put out."""
    if not modules.eight_bit_inputs:
        return 2 * modules.compute
    # Latent attention has two products that read it, each with a copy (multi_latent_attention.py).
    before_attention = 2 if arch.latent_attention is not None else 1
    if not moe or arch.mixture_of_experts is None:
        return before_attention + 1
    # The router keeps it as it is, and shared experts a copy: with delayed scaling they cannot share
    # (shared_experts.py and linear.py, save_original_input).
    shared = arch.mixture_of_experts.shared_expert_intermediate_size > 0
    return before_attention + modules.compute + shared


def _attention_output(modules: Modules, selective: bool) -> int:
    """Bytes kept of each number that attention puts out: by its fused kernel, and by the projection.

    In bf16 that is one tensor; with delayed scaling the projection cannot quantise it again in backward, and
    keeps a copy (attention.py and linear.py, ``save_original_input``). The other attention, and the one that
    is recomputed, keep none.
    """
    if not modules.eight_bit_inputs:
        return modules.compute
    fused = modules.attention != "eager" and not selective
    return 1 + fused * modules.compute


def _attention(arch: Architecture, modules: Modules, tp: int, *, selective: bool) -> list[Saved]:
    """Operands and output of the core attention, and what the projections before it keep."""
    width, latent, c = widths(arch), arch.latent_attention, modules.compute
    output = _attention_output(modules, selective)
    if latent is not None:
        return _latent_attention(arch, modules, output)
    # Where tp exceeds the key/value heads each rank keeps one of them.
    shared: Cut = "key_value_heads"
    rotates = arch.position_embedding == "rope"
    # A fused kernel copies its operands; a checkpoint, and a product with values that are not repeated, hold
    # a view, and so the whole product.
    views = selective or (modules.attention == "eager" and not repeats_heads(arch, tp))
    found = [Saved("attention", width.output * output, "tp")]
    if rotates or not views:
        found += [Saved("attention", width.query * c, "tp"), Saved("attention", width.key * c, shared)]
    if not views:
        found.append(Saved("attention", width.value * c, shared))
    if views or arch.qk_norm:
        # The norms keep their inputs, which are views too.
        found += fused_product(arch, modules, tp)
    if arch.qk_norm:
        heads = arch.num_attention_heads
        copied = copies_query(arch, tp) * width.query * c
        found.append(Saved("attention", copied + heads * norm_statistics(arch), "tp"))
        found.append(Saved("attention", arch.num_key_value_heads * norm_statistics(arch), shared))
    return found


def _latent_attention(arch: Architecture, modules: Modules, output: int) -> list[Saved]:
    """DeepSeek's: the compressed forms before and after their norms, whole on every rank of tp.

    Beside them :func:`latent_angles`, which micro-batches do not multiply.
    """
    latent, width, c = arch.latent_attention, widths(arch), modules.compute
    assert latent is not None
    query = latent.q_lora_rank or 0
    norms = norm_statistics(arch) * (2 if query else 1)
    compressed = (query + latent.kv_lora_rank) * (c + product_input(modules)) + latent.qk_rope_head_dim * c
    return [
        Saved("attention", (width.query + width.key + width.value) * c + width.output * output, "tp"),
        Saved("attention", compressed + norms, "sequence"),
    ]


def latent_angles(arch: Architecture, modules: Modules) -> int:
    """Bytes of each position, for all sequences of a micro-batch: the sines and cosines that latent attention
    makes of its angles anew in each layer, for queries and for keys (rope_utils.py).
    """
    latent = arch.latent_attention
    return 0 if latent is None else 4 * latent.qk_rope_head_dim * modules.compute


def _experts(arch: Architecture, modules: Modules) -> list[Saved]:
    """Tokens by expert, both products' inputs, and the router's."""
    experts, c = arch.mixture_of_experts, modules.compute
    assert experts is not None
    top_k, copies = experts.num_experts_per_tok, inner_copies(arch, modules)
    routed = top_k * experts.moe_intermediate_size * copies
    # Masks, probabilities, the best and their places, and both orders of the sorted tokens.
    router = experts.num_experts * (1 + c) + top_k * (INDEX + FP32 + 2 * INDEX)
    load = modules.expert_load
    return [
        Saved(
            "experts", _loaded(top_k * (arch.hidden_size * product_input(modules) + c), load), "expert_tokens"
        ),
        Saved("experts", _loaded(routed, load), "tp"),
        Saved("experts", copies * experts.shared_expert_intermediate_size, "tp"),
        Saved("experts", router, "sequence"),
    ]


def _loaded(num_bytes: int, load: float) -> int:
    """Bytes on the fullest rank, whose experts have ``load`` times their even share."""
    return num_bytes if load == 1 else round(num_bytes * load)
