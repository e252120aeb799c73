"""What a family's modules can and cannot be, beside the ranges of single fields."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardscope.core.errors import Value, one_of, refuse

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

WITHOUT_EXPERTS = frozenset({
    "gpt2", "phi3", "gemma", "gemma3_text", "phi", "gpt_neox", "olmo2", "granite", "glm", "glm4", "falcon",
    "starcoder2", "nemotron",
})  # fmt: skip
"""Families whose layers cannot have routed experts."""

HEADS_FILL_WIDTH = frozenset({"gpt2", "gpt_neox", "falcon"})
"""Families whose fused projections leave head_dim no choice."""

NORMS: dict[str, tuple[int, ...]] = {
    "phi": (1,), "falcon": (1, 2), "gemma2": (4,), "gemma3_text": (4,), "glm4": (4,),
}  # fmt: skip
"""Norms of hidden_size in a layer, where it is not two."""

PARALLEL: dict[str, tuple[bool, ...]] = {"phi": (True,), "falcon": (True, False), "gpt_neox": (True, False)}
"""Whether attention and MLP may stand side by side, where they may."""


def check_family(arch: Architecture) -> None:
    """Raise ``ValueError`` naming the field that no module of the family can have."""
    family = arch.model_type
    one_of(f"Architecture.norms_per_layer of a {family}", arch.norms_per_layer, NORMS.get(family, (2,)))
    parallel = PARALLEL.get(family, (False,))
    one_of(f"Architecture.parallel_residual of a {family}", arch.parallel_residual, parallel)
    if family != "falcon":
        one_of(
            "Architecture.new_decoder_architecture but in a falcon", arch.new_decoder_architecture, (False,)
        )
    positions = ("rope", "alibi") if family == "falcon" else ("rope", "learned")
    one_of("Architecture.position_embedding", arch.position_embedding, positions)
    if arch.mixture_of_experts is not None and family in WITHOUT_EXPERTS:
        allowed = f"None in a {family}, which has no routed experts"
        refuse("Architecture.mixture_of_experts", arch.mixture_of_experts, allowed, Value(None))
    if family in HEADS_FILL_WIDTH:
        _check_width(arch)
    if family == "falcon":
        _check_falcon(arch)


def _check_width(arch: Architecture) -> None:
    heads, family = arch.num_attention_heads, arch.model_type
    grouped = family != "falcon" and arch.num_key_value_heads != heads
    if grouped or heads * arch.head_dim != arch.hidden_size:
        more = "" if family == "falcon" else ", with as many key and value heads,"
        allowed = f"num_attention_heads x head_dim{more} in a {family}"
        fix_text = f"num_attention_heads={math.gcd(arch.hidden_size, heads)} and head_dim to match"
        refuse("Architecture.hidden_size", arch.hidden_size, allowed, fix_text)


def _check_falcon(arch: Architecture) -> None:
    kv_heads = arch.num_key_value_heads
    if arch.new_decoder_architecture:
        one_of(
            "Architecture.parallel_residual of a new_decoder_architecture", arch.parallel_residual, (True,)
        )
        return
    if kv_heads not in (1, arch.num_attention_heads):
        allowed = f"1 or num_attention_heads={arch.num_attention_heads} without new_decoder_architecture"
        refuse("Architecture.num_key_value_heads", kv_heads, allowed, {"num_key_value_heads": 1})
    norms = 1 if arch.parallel_residual else 2
    one_of("Architecture.norms_per_layer of an older falcon", arch.norms_per_layer, (norms,))
