"""What stands in a rehearsal for Transformer Engine's kernels, which no machine without CUDA can load.

Each keeps for backward, and allocates in backward, what the kernel that it stands for does; nothing is computed.
All around them is megatron-core's own code. Without these, megatron-core's "local" modules would be rehearsed:
they write out attention's scores and are not what anybody trains with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from shardscope.rehearsal.tracker import Tracker


class _Attention(torch.autograd.Function):
    """cuDNN's and FlashAttention's: operands, output, and one fp32 statistic a query and head."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        statistics = torch.empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, statistics)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class FusedAttention(torch.nn.Module):
    """In the place of ``TEDotProductAttention``: its operands are contiguous, as its kernels want them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """(sequence, batch, heads, width) each to (sequence, batch, heads x width)."""
        return _Attention.apply(query.contiguous(), key.contiguous(), value.contiguous()).flatten(2)


class _Norm(torch.autograd.Function):
    """Saves its input and one fp32 number a token, the mean too where it takes one."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        num_statistics = 1 if bias is None else 2
        statistics = [torch.empty(x.shape[:-1], dtype=torch.float32) for _ in range(num_statistics)]
        ctx.save_for_backward(x, weight, *statistics)
        ctx.has_bias = bias is not None
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, *_ = ctx.saved_tensors
        of_bias = torch.empty_like(weight) if ctx.has_bias else None
        return torch.empty_like(x), torch.empty_like(weight), of_bias


class FusedNorm(torch.nn.Module):
    """In the place of ``TENorm``; takes sequence parallelism, which megatron-core's torch norm refuses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        sizes = ("weight",) if config.normalization == "RMSNorm" else ("weight", "bias")
        self.bias = None
        for name in sizes:
            parameter = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            setattr(self, name, parameter)

    def forward(self, x: Any) -> Any:
        """Same shape as ``x``."""
        return _Norm.apply(x, self.weight, self.bias)


class _Rotary(torch.autograd.Function):
    """Saves the angles only, which all layers share."""

    @staticmethod
    def forward(ctx: Any, x: Any, angles: Any) -> Any:
        ctx.save_for_backward(angles)
        return torch.empty(x.shape, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.empty(gradients[0].shape, dtype=gradients[0].dtype), None


def fused_rotary(x: Any, angles: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of Transformer Engine's ``fused_apply_rotary_pos_emb``."""
    return _Rotary.apply(x, angles)


class FusedRegions:
    """Stands for ``torch.compile`` while megatron-core is imported: its ``jit_fuser``.

    A region that the compiler fuses keeps its intermediates in registers: only what it returns, and what it
    leaves for backward, becomes a tensor. Nothing is followed while it runs, and then those are.
    """

    def __init__(self) -> None:
        self.tracker: Tracker | None = None
        self._inside = False

    @contextlib.contextmanager
    def in_place_of_compile(self) -> Iterator[None]:
        """Functions decorated inside become fused regions."""
        before = torch.compile
        torch.compile = self._decorate
        try:
            yield
        finally:
            torch.compile = before

    def _decorate(self, function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return self._decorate

        @wraps(function)
        def region(*args: Any, **kwargs: Any) -> Any:
            if self.tracker is None or self._inside:
                return function(*args, **kwargs)
            return self._run(self.tracker, function, args, kwargs)

        return region

    def _run(self, tracker: Tracker, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        saved: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        self._inside = True
        try:
            with (
                tracker.paused(),
                torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            ):
                out = function(*args, **kwargs)
        finally:
            self._inside = False
        # The arguments are known; what is new comes in now.
        for tensor in (*tree_leaves(out), *saved):
            if isinstance(tensor, torch.Tensor):
                tracker._see(tensor)
        return out
