"""Tensors kept with ``recompute="selective"`` for transformers' modules (training/model/recompute.py).

These are the layer's input, and the outputs of matmuls and of attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.precision import FP32
from shardscope.families.parameter_shapes import find_first_layer
from shardscope.families.registry import find_family
from shardscope.memory.activations.modules.attention import get_attention_widths, is_eager, uses_math_backend
from shardscope.memory.activations.modules.saved_tensors import Modules, SavedTensor

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


def list_selective_tensors(arch: Architecture, moe: bool, modules: Modules) -> list[SavedTensor]:
    """Return every tensor that one layer keeps.

    Experts' grouped matmuls are recomputed, and so are a quantized base's matmuls, which are bitsandbytes'
    own operators.
    """
    c, hidden = modules.compute, arch.hidden_size
    plain = not modules.quantized
    tensors = [
        SavedTensor("norms", hidden * modules.stream, "sequence"),
        SavedTensor(
            "attention", plain * _count_projected(arch) * c + _compute_attention(arch, modules), "tp"
        ),
        SavedTensor("attention", plain * hidden * c, "whole"),
        *_list_adapters(arch, moe, modules),
    ]
    # The router is a matmul; of the experts only the shared one has such matmuls.
    experts = arch.mixture_of_experts
    width = arch.intermediate_size
    if moe and experts is not None:
        # The routers of DeepSeek and GLM-4.5 compute their logits in fp32.
        upcasts = find_family(arch).router in ("sigmoid", "softmax_upcast")
        score = FP32 if upcasts and not modules.autocast else c
        tensors.append(SavedTensor("experts", experts.num_experts * score, "sequence"))
        width = experts.shared_expert_intermediate_size
        if find_family(arch).has_shared_expert_gate:
            tensors.append(SavedTensor("experts", c, "sequence"))
    if width and plain:
        tensors.append(SavedTensor("mlp", (2 if arch.gated_mlp else 1) * width * c, "tp"))
        tensors.append(SavedTensor("mlp", hidden * c, "whole"))
    return tensors


def _count_projected(arch: Architecture) -> int:
    """Return the output elements per token of the projections before attention."""
    latent = arch.latent_attention
    if latent is None:
        return get_attention_widths(arch).inputs
    heads = arch.num_attention_heads
    # DeepSeek-V2, section 2.1: down projections to the latents, then up projections to all heads.
    compressed = (latent.q_lora_rank or 0) + latent.kv_lora_rank + latent.qk_rope_head_dim
    return compressed + heads * (latent.qk_head_dim + latent.qk_nope_head_dim + latent.v_head_dim)


def _compute_attention(arch: Architecture, modules: Modules) -> int:
    """Return bytes of attention's output with flash statistics, or with the scores if not fused."""
    heads, output = arch.num_attention_heads, get_attention_widths(arch).output
    # Eager attention is two batched matmuls: scores, and their product with the values.
    if is_eager(arch, modules):
        return (heads * modules.seq_len + output) * modules.compute
    if uses_math_backend(arch, modules):
        return (heads * modules.seq_len + output) * FP32
    return output * modules.compute + FP32 * heads


def _list_adapters(arch: Architecture, moe: bool, modules: Modules) -> list[SavedTensor]:
    """Return the outputs of each adapter's two matmuls: the rank-wide one and the full-width one."""
    if modules.targets is None:
        return []
    linears = arch.layer_linears(find_first_layer(arch, moe))
    wide = sum(modules.adapter_rank + shape[0] for target, shape in linears if target in modules.targets)
    return [SavedTensor("attention", wide * modules.compute, "tp")]


def compute_int8_inputs(arch: Architecture, moe: bool, modules: Modules, recompute: str) -> int:
    """Return bytes per token that int8 matmuls keep even though the layer is recomputed.

    ``MatMul8bitLt`` stores its input as an attribute (``ctx.tensors``), which activation checkpointing cannot
    drop. Matmuls that read one norm's output share it; selective checkpointing keeps attention's output
    anyway.
    """
    if recompute not in ("full", "selective"):
        return 0
    # The inputs of attention's projections, of its output projection, of the MLP's up and down projections.
    numbers = arch.hidden_size + (get_attention_widths(arch).output if recompute == "full" else 0)
    experts = arch.mixture_of_experts
    wide = arch.intermediate_size
    if moe and experts is not None:
        wide = experts.shared_expert_intermediate_size
    if wide:
        numbers += wide + (0 if arch.norms_per_layer == 1 else arch.hidden_size)
    return numbers * modules.compute
