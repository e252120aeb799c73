"""Tensor conversion between transformers and Megatron's ``GPTModel``, in both directions.

The mapping of names is in :mod:`~shardscope.frameworks.megatron.hf_names`; these pure functions shard and
fuse the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardscope.frameworks.megatron.core_config import padded_vocab_size
from shardscope.frameworks.megatron.hf_names import (
    Pair,
    expert_pairs,
    layer_pairs,
    layer_prefix,
    outer_pairs,
)

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class Part:
    """Slice of the model that one model chunk of one rank holds."""

    layers: tuple[int, ...]
    """Decoder layers of the chunk, numbered from 0 through the whole model."""
    embedding: bool = True
    """Whether the chunk has the embedding (``pre_process``)."""
    head: bool = True
    """Whether the chunk has the final norm and the head (``post_process``)."""
    tp_rank: int = 0
    tp_size: int = 1
    expert_tp_rank: int = 0
    expert_tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1


class Place(NamedTuple):
    """One parameter of a model chunk, and its position in the whole model."""

    name: str
    """Name in the chunk's ``named_parameters()``, with Megatron's local modules."""
    pair: Pair
    prefix: str
    """Prefix of ``pair.hf``: the layer's prefix in transformers, or empty."""
    expert: int | None
    """Routed expert of the layer, numbered from 0 through all ranks; None for other parameters."""


def places(arch: Architecture, part: Part) -> Iterator[Place]:
    """Yield every parameter of a part, in the same order on all ranks of its tensor and expert groups."""
    outer = outer_pairs(arch, embedding=part.embedding, head=part.head)
    for pair in outer:
        yield Place(pair.megatron, pair, "", None)
    for local, layer in enumerate(part.layers):
        here, prefix = f"decoder.layers.{local}.", layer_prefix(arch, layer)
        for pair in layer_pairs(arch, layer):
            yield Place(here + pair.megatron, pair, prefix, None)
        if not arch.is_moe_layer(layer) or arch.mixture_of_experts is None:
            continue
        num_local = arch.mixture_of_experts.num_experts // part.ep_size
        for index in range(num_local):
            expert = part.ep_rank * num_local + index
            for pair in expert_pairs():
                name = f"{here}mlp.experts.local_experts.{index}.{pair.megatron}"
                yield Place(name, pair, prefix, expert)


def megatron_tensor(state: Mapping[str, Any], arch: Architecture, place: Place, part: Part) -> torch.Tensor:
    """Return one parameter of one rank. ``state`` has tensors, or objects that read slices of one lazily."""
    found = [state[place.prefix + name] for name in place.pair.hf]
    if place.expert is not None:
        sources = [stack[place.expert].detach() for stack in found]
        rank, size = part.expert_tp_rank, part.expert_tp_size
    else:
        sources = [tensor.detach() for tensor in found]
        rank, size = part.tp_rank, part.tp_size
    return cut(whole_tensor(sources, arch, place.pair), place.pair, rank, size)


def whole_tensor(sources: Sequence[torch.Tensor], arch: Architecture, pair: Pair) -> torch.Tensor:
    """Fuse transformers tensors, in the order of ``pair.hf``, into the unsharded Megatron parameter."""
    found = [source.t() if pair.transposed else source for source in sources]
    if pair.cut == "qkv":
        heads = _head_rows(arch)
        query, key, value = found if len(found) == 3 else found[0].split(heads)
        groups, rest = arch.num_key_value_heads, query.shape[1:]
        by_group = [rows.reshape(groups, -1, *rest) for rows in (query, key, value)]
        return torch.cat(by_group, dim=1).reshape(-1, *rest)
    return torch.cat(found) if len(found) > 1 else found[0]


def hf_tensors(whole: torch.Tensor, arch: Architecture, pair: Pair) -> tuple[torch.Tensor, ...]:
    """Split an unsharded Megatron parameter into the transformers tensors, in the order of ``pair.hf``."""
    found: tuple[torch.Tensor, ...] = (whole,)
    if pair.cut == "vocabulary":
        found = (whole[: arch.vocab_size],)
    elif pair.cut == "qkv":
        groups, rest = arch.num_key_value_heads, whole.shape[1:]
        rows = [count // groups for count in _head_rows(arch)]
        parts = whole.reshape(groups, -1, *rest).split(rows, dim=1)
        found = tuple(part.reshape(-1, *rest) for part in parts)
        if len(pair.hf) == 1:
            found = (torch.cat(found),)
    elif pair.cut == "gated" and len(pair.hf) == 2:
        found = tuple(whole.chunk(2))
    return tuple((part.t() if pair.transposed else part).contiguous() for part in found)


def cut(whole: torch.Tensor, pair: Pair, rank: int, size: int) -> torch.Tensor:
    """Return one rank's shard of a Megatron parameter; the vocabulary is first padded with zeros."""
    if pair.cut == "whole":
        return whole
    if pair.cut == "vocabulary":
        padding = padded_vocab_size(whole.shape[0], size) - whole.shape[0]
        whole = torch.cat([whole, whole.new_zeros(padding, *whole.shape[1:])]) if padding else whole
    if size == 1:
        return whole
    if pair.cut == "gated":
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, dim=1 if pair.cut == "columns" else 0)[rank]


def join(parts: Sequence[torch.Tensor], pair: Pair) -> torch.Tensor:
    """Join the shards of a parameter, in the order of their ranks."""
    if pair.cut == "whole" or len(parts) == 1:
        return parts[0]
    if pair.cut == "gated":
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(list(parts), dim=1 if pair.cut == "columns" else 0)


def _head_rows(arch: Architecture) -> list[int]:
    """Return the rows of queries, keys and values."""
    key = arch.num_key_value_heads * arch.head_dim
    return [arch.num_attention_heads * arch.head_dim, key, key]
