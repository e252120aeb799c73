"""Names of an architecture's modules in transformers, from the family's record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.families.registry import find_family

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.families.family import Names


def list_parameter_names(arch: Architecture) -> Names:
    """Return the module names of the family of ``arch``."""
    return find_family(arch).names


def list_norm_names(arch: Architecture) -> tuple[str, ...]:
    """Return the names of one layer's norms of hidden_size."""
    names = list_parameter_names(arch)
    if names.parallel_norms and arch.parallel_residual and arch.norms_per_layer == 2:
        return names.parallel_norms
    return names.norms[: arch.norms_per_layer]


def list_mlp_inputs(arch: Architecture) -> tuple[str, ...]:
    """Return the names of the projections that read the dense MLP's input."""
    names = list_parameter_names(arch)
    if not arch.gated_mlp:
        return (names.up,)
    return (names.fused_gate_up,) if names.fused_gate_up else ("gate_proj", "up_proj")


def list_attention_inputs(arch: Architecture) -> tuple[str, ...]:
    """Return the names of the projections that read the attention's input."""
    if arch.latent_attention is not None:
        query = "q_a_proj" if arch.latent_attention.q_lora_rank else "q_proj"
        return (query, "kv_a_proj_with_mqa")
    fused = list_parameter_names(arch).fused_qkv
    return (fused,) if fused else ("q_proj", "k_proj", "v_proj")
