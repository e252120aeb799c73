"""Checks of an architecture against its family, beyond the ranges of single fields."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardscope.core.errors import Value, check_choice, refuse
from shardscope.families.registry import find_family

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.families.family import Family


def check_family(arch: Architecture) -> None:
    """Raise ``ValueError`` that names a field value that the family's modules do not support."""
    family, name = find_family(arch), arch.model_type
    check_choice(f"Architecture.norms_per_layer of a {name}", arch.norms_per_layer, family.norms_per_layer)
    check_choice(
        f"Architecture.parallel_residual of a {name}", arch.parallel_residual, family.parallel_residual
    )
    if not family.has_new_decoder_architecture:
        check_choice(
            "Architecture.new_decoder_architecture but in a falcon", arch.new_decoder_architecture, (False,)
        )
    check_choice("Architecture.position_embedding", arch.position_embedding, family.position_embeddings)
    if arch.mixture_of_experts is not None and not family.may_have_experts:
        allowed = f"None in a {name}, which has no routed experts"
        refuse("Architecture.mixture_of_experts", arch.mixture_of_experts, allowed, Value(None))
    if family.heads_fill_width:
        _check_width(arch, family)
    if family.check:
        family.check(arch)


def _check_width(arch: Architecture, family: Family) -> None:
    heads = arch.num_attention_heads
    grouped = arch.num_key_value_heads != heads and not family.has_grouped_queries
    if grouped or heads * arch.head_dim != arch.hidden_size:
        more = "" if family.has_grouped_queries else ", with as many key and value heads,"
        allowed = f"num_attention_heads x head_dim{more} in a {arch.model_type}"
        fix_text = f"num_attention_heads={math.gcd(arch.hidden_size, heads)} and head_dim to match"
        refuse("Architecture.hidden_size", arch.hidden_size, allowed, fix_text)
