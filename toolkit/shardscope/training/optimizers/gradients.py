"""Norm and clipping of replicated (DDP) or sharded (FSDP2) gradients, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``tensor``, without communication."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter],
    device: torch.device,
    shard_group: dist.ProcessGroup | None,
    max_norm: float | None,
    copies: Callable[[torch.nn.Parameter], int] | None = None,
) -> torch.Tensor:
    """Clip gradients to ``max_norm`` in place (None: no clipping). Return the whole model's norm before that.

    The norm stays on ``device``: reading it here would add a synchronization per step.

    ``shard_group`` is the process group over which gradients are sharded, None if they are replicated.
    ``copies`` returns the number of ranks in it with the same shard of a parameter (default 1): norm weights
    are replicated over tensor-parallel ranks.
    ``torch.nn.utils.clip_grad_norm_`` is not used because with CPU-offloaded shards it reduces CPU tensors,
    which NCCL cannot do; here only one number is reduced, on ``device``.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [local_shard(parameter.grad) for parameter in trained if parameter.grad is not None]
    # All norms by one call, and in fp32: squares of bf16 gradients would lose most of their digits.
    squares = torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32)).square()
    if copies is not None:
        counts = torch.tensor([copies(parameter) for parameter in trained], dtype=torch.float32)
        squares = squares / counts.to(squares.device, non_blocking=True)
    # From the host, if the shards are offloaded, to the device on which NCCL reduces.
    total = squares.sum().to(device)
    if shard_group is not None:
        dist.all_reduce(total, group=shard_group)
    norm = total.sqrt()
    if max_norm is None:
        return norm
    # As torch.nn.utils.clip_grad_norm_ (torch 2.13, utils/clip_grad.py): 1e-6 avoids a division by zero.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # On a CPU, reading the scale is free, and skipping a scale of 1 saves a pass over all gradients.
    if device.type != "cpu" or bool(scale < 1):
        torch._foreach_mul_(gradients, scale.to(gradients[0].device))
    return norm
