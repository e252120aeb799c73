"""Saved tensors of transformers' modules with Liger's kernels: fused RMSNorm, rotary embedding and SwiGLU.

Read from each ``save_for_backward`` of liger-kernel 0.8 (``ops/rms_norm.py``, ``ops/swiglu.py``,
``ops/rope.py``). Hsu et al. 2024, arXiv:2410.10989.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.precision import FP32
from shardscope.families.registry import list_families_with
from shardscope.memory.activations.modules.attention import get_attention_widths, list_kernel_tensors
from shardscope.memory.activations.modules.saved_tensors import Modules, SavedTensor, list_stream_readers

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

LIGER_FAMILIES = list_families_with("liger_kernels")
"""Families for which ``apply_liger_kernel_to_...`` replaces every norm and the whole MLP, and nothing
else."""


def list_liger_tensors(arch: Architecture, modules: Modules) -> list[SavedTensor]:
    """Return every tensor that the layer saves."""
    c, hidden = modules.compute, arch.hidden_size
    attention_readers, mlp_readers = list_stream_readers(arch)
    inputs = modules.stream_copies(*attention_readers) + modules.stream_copies(*mlp_readers)
    tensors = [
        # RMSNorm saves its input uncast and 1/rms; its output is saved only if a projection reads it.
        SavedTensor("norms", arch.norms_per_layer * (hidden * modules.stream + FP32), "sequence"),
        SavedTensor("norms", inputs * hidden * c, "sequence"),
        *list_kernel_tensors(arch, modules),
        # Both branches and, for the down projection, their product.
        SavedTensor("mlp", (2 + modules.inner_copies("down_proj")) * arch.intermediate_size * c, "tp"),
    ]
    if arch.qk_norm:
        width, heads = get_attention_widths(arch), arch.num_attention_heads + arch.num_key_value_heads
        tensors.append(SavedTensor("attention", (width.query + width.key) * c + FP32 * heads, "tp"))
    return tensors


def compute_liger_final_norm(arch: Architecture, modules: Modules) -> int:
    """Return bytes per token saved by the final norm."""
    return arch.hidden_size * modules.stream + FP32
