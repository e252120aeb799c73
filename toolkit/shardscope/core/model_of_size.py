"""Llama-shaped decoders of about a given number of parameters, for rehearsals and what-if plans."""

from __future__ import annotations

import math
import re

from shardscope.core.architecture import Architecture
from shardscope.core.errors import Value, refuse

UNITS = {"m": 10**6, "b": 10**9, "t": 10**12}
ASPECT = 128
"""Hidden size per layer, near the optimum at every scale: Kaplan et al. 2020 (arXiv:2001.08361), figure 5.
LLaMA 7B and 65B have 128 and 102."""


def build_model_of_size(size: str) -> Architecture:
    """Create the architecture; see :meth:`shardscope.core.architecture.Architecture.of_size`."""
    target = _parse_size(size)
    # With a full-size vocabulary, the embedding would be most of a small model's parameters.
    vocab = 2_048 if target < 10**7 else 8_192 if target < 10**8 else 32_000
    tied = target < 10**9
    # Try all hidden sizes; keep the shape nearest to ASPECT and to an MLP of 8/3 hidden within 2.5 %.
    best: tuple[float, int, int, int, int] | None = None
    for heads, head_dim in _list_head_shapes(target):
        hidden = heads * head_dim
        outer = vocab * hidden * (1 if tied else 2) + hidden
        # One layer with an MLP of 8/3 hidden holds 4 h^2 + 3 x 8/3 h^2 = 12 h^2 parameters.
        ideal = (target - outer) / (12 * hidden * hidden)
        for layers in (max(2, math.floor(ideal)), max(2, math.ceil(ideal))):
            intermediate = _fit_intermediate_size(target, outer, hidden, layers, head_dim)
            if not intermediate or layers > 1_024:
                continue
            # Llama's layer: four square attention matrices, three MLP matrices and two norms.
            count = outer + layers * (4 * hidden * hidden + 3 * hidden * intermediate + 2 * hidden)
            error = abs(count / target - 1)
            if error > 0.025:
                continue
            slender = abs(math.log(hidden / layers / ASPECT)) + abs(math.log(intermediate * 3 / 8 / hidden))
            if best is None or slender + error < best[0]:
                best = (slender + error, hidden, intermediate, layers, heads)
    assert best is not None, size
    _, hidden, intermediate, layers, heads = best
    return Architecture(
        name=f"llama-shaped-{size.strip().lower()}",
        model_type="llama",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_position_embeddings=4_096,
        tie_word_embeddings=tied,
    )


def _parse_size(size: object) -> float:
    allowed = "a number and m, b or t, from 1m to 10t"
    match = isinstance(size, str) and re.fullmatch(
        r"(\d{1,6}(?:\.\d{1,6})?)([mbt])", size.strip().lower(), re.A
    )
    if not match:
        refuse("size", size, allowed, "'7b' (also '2m', '350m', '1.3b', '1t')")
    target = float(match[1]) * UNITS[match[2]]
    if not 10**6 <= target <= 10**13:
        refuse("size", size, allowed, Value("1m" if target < 10**6 else "10t"))
    return target


def _list_head_shapes(target: float) -> list[tuple[int, int]]:
    """Return candidates of (heads, head_dim). From 1b on, heads are multiples of 8 for tensor parallelism."""
    if target >= 10**9:
        return [(heads, 128) for heads in range(8, 2_049, 8)]
    if target >= 10**8:
        return [(heads, 64) for heads in range(4, 65, 2)]
    return [(heads, dim) for dim in (32, 64) for heads in range(2, 33, 2)]


def _fit_intermediate_size(target: float, outer: int, hidden: int, layers: int, head_dim: int) -> int:
    """Return the MLP width, a multiple of the tile, nearest to ``target``; 0 if far from 8/3 hidden."""
    tile = 256 if head_dim == 128 else 32
    wanted = ((target - outer) / layers - 4 * hidden * hidden - 2 * hidden) / (3 * hidden)
    intermediate = round(wanted / tile) * tile
    return intermediate if 1.6 * hidden <= intermediate <= 4.2 * hidden else 0
