"""Attention that keeps no scores, in PyTorch's fused kernels, for layers of Megatron-core's own modules.

What Megatron-core has itself (``DotProductAttention``) writes the scores of all pairs of tokens to memory. A
plan's memory and time are of fused kernels, as people train with them through Transformer Engine.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.transformer.dot_product_attention import DotProductAttention


class FusedAttention(DotProductAttention):  # type: ignore[misc]
    """Causal, over whole sequences, without dropout; keys and values may have fewer heads than queries."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """All are (tokens, rows, heads, width); what comes out is (tokens, rows, heads x width)."""
        # Values are a view of one product with queries and keys, which rotation has copied: so left they
        # would keep all of it for backward.
        queries, keys, values = (tensor.contiguous().permute(1, 2, 0, 3) for tensor in (query, key, value))
        grouped = key.shape[2] != query.shape[2]
        attended = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped
        )
        return attended.permute(2, 0, 1, 3).flatten(2)
