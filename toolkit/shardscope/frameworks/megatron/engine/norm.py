"""Norms of torch that take sequence parallelism, for ranks without Transformer Engine or Apex."""

from __future__ import annotations

from typing import Any

import torch


class MarkedNorm:
    """In the place of ``WrappedTorchNorm``, which refuses sequence parallelism for want of one mark.

    Each rank of tp sees its own part of the sequence, so a norm's weights get part of their gradient on each;
    ``finalize_model_grads`` sums what carries the mark (megatron/core/distributed/finalize_model_grads.py).
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """A ``LayerNorm`` or ``RMSNorm`` of ``hidden_size``."""
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
