"""Limits of model sizes: lowest and highest allowed values."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardscope.core.errors import check_integer

LIMITS: Mapping[str, tuple[int, int]] = MappingProxyType({
    "hidden_size": (1, 262_144),
    "intermediate_size": (1, 4_194_304),
    "num_hidden_layers": (1, 4_096),
    "num_attention_heads": (1, 4_096),
    "num_key_value_heads": (1, 4_096),
    "head_dim": (1, 16_384),
    "vocab_size": (1, 16_777_216),
    "max_position_embeddings": (1, 134_217_728),
    "num_experts": (1, 65_536),
    "moe_intermediate_size": (1, 4_194_304),
    "lora_rank": (1, 262_144),
})  # fmt: skip
"""Lowest and highest allowed sizes; the highest are about ten times those of the largest published models."""


def check_size(field: str, value: object, limit: str) -> int:
    """Return ``value`` as an int. Raises ``ValueError`` for ``field`` unless it is in ``LIMITS[limit]``."""
    low, high = LIMITS[limit]
    return check_integer(field, value, low=low, high=high)


def check_size_field(owner: str, noun: object, field: str) -> int:
    """Check ``noun.field`` against its limits, store it as a Python int and return it.

    Raises ``ValueError``.
    """
    number = check_size(f"{owner}.{field}", getattr(noun, field), field)
    object.__setattr__(noun, field, number)  # numpy integers may overflow, Python ints cannot
    return number
