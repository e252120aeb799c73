"""What CUDA has one kernel for, on CPU ranks: with the same tensors kept for backward, in a few operators.

A rehearsal on CPU ranks is to hold what the run on GPUs will.
"""

from __future__ import annotations

from typing import Any

import torch


def swiglu_back(gradient: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    """megatron-core's ``swiglu_back`` by torch's own derivative of SiLU: half the passes over its tensors."""
    gate, up = both.chunk(2, -1)
    of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
    return torch.cat((of_gate, gradient * torch.nn.functional.silu(gate)), -1)


def rms_norm(
    hidden: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """``torch.nn.functional.rms_norm`` over the last dimension, which on a CPU keeps its output twice."""
    if weight is None or eps is None or len(normalized_shape) != 1:
        raise ValueError(f"a norm over {tuple(normalized_shape)} without weight or eps is none of Megatron's")
    normed: torch.Tensor = _RmsNorm.apply(hidden, weight, eps)
    return normed


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    """Keeps its input and one number a row (Zhang & Sennrich 2019, section 3, and its derivative)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = hidden.float()
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        return (wide * scale).mul_(weight).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, weight, scale = ctx.saved_tensors
        normed = hidden.float() * scale
        weighted = gradient * weight
        of_weight = (gradient * normed).flatten(0, -2).sum(0)
        along = (weighted * normed).mean(-1, keepdim=True)
        of_hidden = (weighted - normed * along).mul_(scale)
        return of_hidden.to(hidden.dtype), of_weight.to(weight.dtype), None
