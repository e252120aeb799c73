"""A stand-in for Transformer Engine's attention on CPU ranks: the same call, the same answer, another way.

Transformer Engine passes keys and values around a ring of GPUs. Here they are gathered over the whole
context-parallel group, put back in the order of the sequence, and attended to with a mask; it is as slow and
as large as that sounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812


class GatheredAttention(torch.nn.Module):
    """Takes what ``TEDotProductAttention`` does: (tokens here, rows, heads, width) each."""

    def __init__(self, *, config: Any, pg_collection: Any, softmax_scale: float | None, **_: Any) -> None:
        super().__init__()
        assert config.context_parallel_size == pg_collection.cp.size() > 1
        self.group, self.scale = pg_collection.cp, softmax_scale

    def forward(
        self, query: Any, key: Any, value: Any, attention_mask: Any, attn_mask_type: Any, **_: Any
    ) -> Any:
        assert attention_mask is None and attn_mask_type.name == "causal"
        here, by_rank = self.positions(query.shape[0])
        order = torch.cat(by_rank).argsort()
        key, value = (self.gathered(tensor)[order] for tensor in (key, value))
        mask = here[:, None] >= torch.arange(len(order))
        heads_first = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=self.scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)

    def positions(self, num_tokens: int) -> tuple[Any, list[Any]]:
        """Places in the sequence of this rank's tokens, and of each rank's: pieces r and 2 x cp - 1 - r."""
        size, piece = self.group.size(), num_tokens // 2
        starts = [(rank * piece, (2 * size - 1 - rank) * piece) for rank in range(size)]
        found = [torch.cat([torch.arange(start, start + piece) for start in two]) for two in starts]
        return found[self.group.rank()], found

    def gathered(self, tensor: Any) -> Any:
        """All ranks' tokens, rank after rank."""
        gathered: Any = Gathered.apply(tensor, self.group)
        return gathered


class Gathered(torch.autograd.Function):
    """All-gather along the first dimension, and back: the sum of all ranks' gradients for what is here."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, group: Any) -> Any:
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        whole = gradient.contiguous()
        dist.all_reduce(whole, group=ctx.group)
        return whole.chunk(ctx.group.size())[ctx.group.rank()], None


class KeysStayAtHome(GatheredAttention):
    """Attends to its own part alone, as attention that knows of no other ranks would."""

    def gathered(self, tensor: Any) -> Any:
        return torch.cat([tensor] * self.group.size())


class NothingComesBack(GatheredAttention):
    """Right forward; keys get no gradient from other ranks' queries."""

    def gathered(self, tensor: Any) -> Any:
        whole = super().gathered(tensor.detach())
        parts = list(whole.chunk(self.group.size()))
        parts[self.group.rank()] = tensor
        return torch.cat(parts)


@contextmanager
def parts_are_trained() -> Iterator[None]:
    """Plans with cp are not refused on CPU ranks; imports no megatron-core."""
    from shardscope.frameworks.megatron import limits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "_check_context_device", nothing)
        patch.setattr(limits, "_check_transformer_engine", nothing)
        yield


@contextmanager
def instead_of_transformer_engine(attention: type = GatheredAttention) -> Iterator[None]:
    """They train there, with ``attention`` in Transformer Engine's place."""
    from megatron.core.extensions import transformer_engine

    with parts_are_trained(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_engine, "TEDotProductAttention", attention)
        patch.setattr(torch, "tensor", unpinned(torch.tensor))
        yield


def nothing(*_: Any) -> None:
    return None


def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron-core pins the numbers of a rank's pieces for a GPU (``get_pos_emb_on_this_cp_rank``)."""

    def call(*given: Any, pin_memory: bool = False, **named: Any) -> Any:
        return make(*given, **named)

    return call
