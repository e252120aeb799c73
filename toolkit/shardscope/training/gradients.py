"""Norm and clipping of gradients that are whole (DDP) or in shards (FSDP2), on any device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

MAX_GRAD_NORM = 1.0


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own part of ``tensor``, with no communication."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def clip(
    parameters: Iterable[torch.nn.Parameter],
    device: torch.device,
    shard_group: Any | None = None,
    max_norm: float = MAX_GRAD_NORM,
) -> float:
    """Scale gradients to ``max_norm`` in place; return the norm of the whole model's gradient before that.

    ``shard_group`` is the process group over which gradients are sharded, None if each rank holds them whole.
    ``torch.nn.utils.clip_grad_norm_`` is not used because with CPU-offloaded shards it reduces CPU tensors,
    which a NCCL-only process group cannot do; here one number travels, on ``device``.
    """
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    squares = [torch.linalg.vector_norm(gradient, dtype=torch.float32) ** 2 for gradient in gradients]
    total = sum((square.to(device) for square in squares), torch.zeros((), device=device))
    if shard_group is not None:
        dist.all_reduce(total, group=shard_group)
    norm = float(total.sqrt())
    if norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
    return norm
