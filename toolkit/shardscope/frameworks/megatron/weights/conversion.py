"""Tensor conversion between transformers and Megatron's ``GPTModel``, in both directions.

The mapping of names is in :mod:`~shardscope.frameworks.megatron.hf_names`; these pure functions shard and
fuse the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from shardscope.frameworks.megatron.core_config import compute_padded_vocab_size
from shardscope.frameworks.megatron.hf_names import (
    ParameterMapping,
    get_layer_prefix,
    list_expert_mappings,
    list_layer_mappings,
    list_outer_mappings,
)

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


class TensorSource(Protocol):
    """A transformers tensor, or an object that reads the tensor or one of its rows when it is needed."""

    def detach(self) -> torch.Tensor: ...

    def __getitem__(self, index: int, /) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class ChunkSlice:
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


class ChunkParameter(NamedTuple):
    """One parameter of a model chunk, and its position in the whole model."""

    name: str
    """Name in the chunk's ``named_parameters()``, with Megatron's local modules."""
    mapping: ParameterMapping
    prefix: str
    """Prefix of ``mapping.hf``: the layer's prefix in transformers, or empty."""
    expert: int | None
    """Routed expert of the layer, numbered from 0 through all ranks; None for other parameters."""


def list_parameters(arch: Architecture, part: ChunkSlice) -> Iterator[ChunkParameter]:
    """Yield every parameter of a part, in the same order on all ranks of its tensor and expert groups."""
    outer = list_outer_mappings(arch, embedding=part.embedding, head=part.head)
    for mapping in outer:
        yield ChunkParameter(mapping.megatron, mapping, "", None)
    for local, layer in enumerate(part.layers):
        local_prefix, prefix = f"decoder.layers.{local}.", get_layer_prefix(arch, layer)
        for mapping in list_layer_mappings(arch, layer):
            yield ChunkParameter(local_prefix + mapping.megatron, mapping, prefix, None)
        if not arch.is_moe_layer(layer) or arch.mixture_of_experts is None:
            continue
        # Consecutive experts are on one rank (moe_layer.py, local_expert_indices).
        num_local = arch.mixture_of_experts.num_experts // part.ep_size
        for index in range(num_local):
            expert = part.ep_rank * num_local + index
            for mapping in list_expert_mappings():
                name = f"{local_prefix}mlp.experts.local_experts.{index}.{mapping.megatron}"
                yield ChunkParameter(name, mapping, prefix, expert)


def build_shard(
    state: Mapping[str, TensorSource], arch: Architecture, parameter: ChunkParameter, part: ChunkSlice
) -> torch.Tensor:
    """Return one parameter of one rank, from the tensors of the whole model by transformers name."""
    tensors = [state[parameter.prefix + name] for name in parameter.mapping.hf]
    # transformers stacks the experts of a layer in one tensor; only this expert's matrix is read.
    if parameter.expert is not None:
        sources = [stack[parameter.expert].detach() for stack in tensors]
        rank, size = part.expert_tp_rank, part.expert_tp_size
    else:
        sources = [tensor.detach() for tensor in tensors]
        rank, size = part.tp_rank, part.tp_size
    return shard_tensor(fuse_tensors(sources, arch, parameter.mapping), parameter.mapping, rank, size)


def fuse_tensors(
    sources: Sequence[torch.Tensor], arch: Architecture, mapping: ParameterMapping
) -> torch.Tensor:
    """Fuse transformers tensors, in the order of ``mapping.hf``, into the unsharded Megatron parameter."""
    tensors = [source.t() if mapping.transposed else source for source in sources]
    if mapping.sharding == "qkv":
        # The queries of a key-value head, its key and its value are adjacent rows (attention.py,
        # get_query_key_value_tensors), so an even cut by rows gives every rank whole heads.
        heads = _count_head_rows(arch)
        query, key, value = tensors if len(tensors) == 3 else tensors[0].split(heads)
        groups, rest = arch.num_key_value_heads, query.shape[1:]
        by_group = [rows.reshape(groups, -1, *rest) for rows in (query, key, value)]
        return torch.cat(by_group, dim=1).reshape(-1, *rest)
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def split_tensor(
    full: torch.Tensor, arch: Architecture, mapping: ParameterMapping
) -> tuple[torch.Tensor, ...]:
    """Split an unsharded Megatron parameter into the transformers tensors, in the order of ``mapping.hf``."""
    tensors: tuple[torch.Tensor, ...] = (full,)
    if mapping.sharding == "vocabulary":
        tensors = (full[: arch.vocab_size],)
    elif mapping.sharding == "qkv":
        groups, rest = arch.num_key_value_heads, full.shape[1:]
        rows = [count // groups for count in _count_head_rows(arch)]
        parts = full.reshape(groups, -1, *rest).split(rows, dim=1)
        tensors = tuple(part.reshape(-1, *rest) for part in parts)
        # GPT-2 has one fused matrix too, in another order: all queries, all keys, all values.
        if len(mapping.hf) == 1:
            tensors = (torch.cat(tensors),)
    elif mapping.sharding == "gated" and len(mapping.hf) == 2:
        tensors = tuple(full.chunk(2))
    return tuple((part.t() if mapping.transposed else part).contiguous() for part in tensors)


def shard_tensor(full: torch.Tensor, mapping: ParameterMapping, rank: int, size: int) -> torch.Tensor:
    """Return one rank's shard of a Megatron parameter; the vocabulary is first padded with zeros."""
    if mapping.sharding == "whole":
        return full
    if mapping.sharding == "vocabulary":
        # On each rank the same padding as Megatron-LM's (megatron/training/tokenizer): the rows must divide.
        padding = compute_padded_vocab_size(full.shape[0], size) - full.shape[0]
        full = torch.cat([full, full.new_zeros(padding, *full.shape[1:])]) if padding else full
    if size == 1:
        return full
    # Each rank computes the activation on its own shard, so it needs matching rows of gate and up.
    if mapping.sharding == "gated":
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size, dim=1 if mapping.sharding == "columns" else 0)[rank]


def join_shards(shards: Sequence[torch.Tensor], mapping: ParameterMapping) -> torch.Tensor:
    """Join the shards of a parameter, in the order of their ranks."""
    if mapping.sharding == "whole" or len(shards) == 1:
        return shards[0]
    if mapping.sharding == "gated":
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(list(shards), dim=1 if mapping.sharding == "columns" else 0)


def _count_head_rows(arch: Architecture) -> list[int]:
    """Return the rows of queries, keys and values."""
    key = arch.num_key_value_heads * arch.head_dim
    return [arch.num_attention_heads * arch.head_dim, key, key]
