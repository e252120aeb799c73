"""Replacements in rehearsals for Transformer Engine's modules, which cannot be loaded without CUDA.

Each saves for backward, and allocates in backward, what the real kernel does; nothing is computed. The code
around them is megatron-core's own. Without them, rehearsals would use megatron-core's "local" modules, which
store attention scores and are not used for training.
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


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """cuDNN's and FlashAttention's saved tensors: operands, output, one fp32 statistic per query and head."""

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


class FusedAttention(torch.nn.Module):  # type: ignore[misc]
    """Replacement of ``TEDotProductAttention``, with contiguous operands as its kernels require."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Map inputs (sequence, batch, heads, width) to (sequence, batch, heads x width)."""
        return _Attention.apply(query.contiguous(), key.contiguous(), value.contiguous()).flatten(2)


class CausalSoftmax(torch.autograd.Function):  # type: ignore[misc]
    """Replacement of ``ScaledUpperTriangMaskedSoftmax``: saves its output, and overwrites the incoming
    gradient with its own (apex, csrc/megatron/scaled_upper_triang_masked_softmax.h)."""

    @staticmethod
    def forward(ctx: Any, scores: Any, scale: Any) -> Any:
        out = torch.empty_like(scores)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def softmax_batch_per_block(query_len: int, key_len: int, batch: int, heads: int) -> int:
    """Return the rows that one block of the fused softmax processes (apex, scaled_masked_softmax.h)."""
    return 4 * (2 if key_len <= 128 else 1)


class _Norm(torch.autograd.Function):  # type: ignore[misc]
    """Fused norm that saves its input and one fp32 statistic per token, for LayerNorm also the mean."""

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


class FusedNorm(torch.nn.Module):  # type: ignore[misc]
    """Replacement of ``TENorm``; supports sequence parallelism, unlike megatron-core's torch norm."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        sizes = ("weight",) if config.normalization == "RMSNorm" else ("weight", "bias")
        self.bias = None
        for name in sizes:
            parameter = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
            parameter.sequence_parallel = config.sequence_parallel
            setattr(self, name, parameter)

    def forward(self, x: Any) -> Any:
        """Return a tensor of the same shape as ``x``."""
        return _Norm.apply(x, self.weight, self.bias)


class _Rotary(torch.autograd.Function):  # type: ignore[misc]
    """Rotary embedding that saves only the angles, which all layers share."""

    @staticmethod
    def forward(ctx: Any, x: Any, angles: Any) -> Any:
        ctx.save_for_backward(angles)
        return torch.empty(x.shape, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.empty(gradients[0].shape, dtype=gradients[0].dtype), None


class _Embedding(torch.autograd.Function):  # type: ignore[misc]
    """Embedding that saves its indices and makes one gradient; on fake tensors PyTorch's makes two."""

    @staticmethod
    def forward(ctx: Any, indices: Any, weight: Any) -> Any:
        ctx.save_for_backward(indices)
        ctx.like = weight.detach()
        return weight.new_empty((*indices.shape, weight.shape[1]))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, torch.empty_like(ctx.like)


def embedding(indices: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``torch.nn.functional.embedding``."""
    return _Embedding.apply(indices, weight)


def fused_rotary(x: Any, angles: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace Transformer Engine's ``fused_apply_rotary_pos_emb``."""
    return _Rotary.apply(x, angles)


class DuplicatedLinear(torch.nn.Module):  # type: ignore[misc]
    """Replacement of ``TELinear(parallel_mode="duplicated")``: every tp rank has the whole weight."""

    def __init__(self, inner: int, out: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.empty(out, inner, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Any) -> tuple[Any, None]:
        """Map (..., inner) to (..., out), without bias."""
        from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

        out = linear_with_grad_accumulation_and_async_allreduce(
            x, self.weight, None, self.config.gradient_accumulation_fusion, False, False
        )
        return out, None


class _GroupedProduct(torch.autograd.Function):  # type: ignore[misc]
    """Grouped matmul of all experts in one kernel; weight gradients are added to the main gradients."""

    @staticmethod
    def forward(ctx: Any, x: Any, *weights: Any) -> Any:
        ctx.save_for_backward(x, *weights)
        return x.new_empty((x.shape[0], weights[0].shape[0]))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        from megatron.core.tensor_parallel import layers

        x, *weights = ctx.saved_tensors
        for weight in weights:
            weight.grad_added_to_main_grad = True
        dummies = [layers.get_dummy_wgrad(list(weight.shape), weight.dtype) for weight in weights]
        return torch.empty_like(x), *dummies


class FusedExperts(torch.nn.Module):  # type: ignore[misc]
    """Replacement of ``TEGroupedMLP``: all experts of a rank in two grouped matmuls."""

    def __init__(self, num_local_experts: int, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.config = config
        inner = config.moe_ffn_hidden_size // (config.expert_tensor_parallel_size or 1)
        branches = 2 if config.gated_linear_unit else 1
        self.fc1 = self._weights(num_local_experts, branches * inner, config.hidden_size)
        self.fc2 = self._weights(num_local_experts, config.hidden_size, inner)

    def _weights(self, num_local_experts: int, out: int, inner: int) -> torch.nn.ParameterList:
        made = [
            torch.nn.Parameter(torch.empty(out, inner, dtype=self.config.params_dtype))
            for _ in range(num_local_experts)
        ]
        for weight in made:
            # By this attribute DDP puts them in the buffers of the expert-data-parallel ranks.
            weight.allreduce = self.config.expert_model_parallel_size == 1
        return torch.nn.ParameterList(made)

    def forward(self, x: Any, tokens_per_expert: Any, probabilities: Any) -> tuple[Any, None]:
        """Map (tokens, hidden) of this rank's experts, sorted by expert, to the same shape."""
        from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

        inner = _GroupedProduct.apply(x, *self.fc1)
        inner = weighted_bias_swiglu_impl(inner, None, probabilities.unsqueeze(-1))
        return _GroupedProduct.apply(inner, *self.fc2), None


class FusedRegions:
    """Replacement of ``torch.compile`` (``jit_fuser``) while megatron-core is imported.

    A fused region keeps its intermediates in registers: only its outputs and the tensors saved for backward
    are allocated. The tracker therefore pauses while a region runs, and then sees only those.
    """

    def __init__(self) -> None:
        self.tracker: Tracker | None = None
        self._inside = False

    @contextlib.contextmanager
    def in_place_of_compile(self) -> Iterator[None]:
        """Turn functions that are decorated inside the context into fused regions."""
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
        # The tracker knows the arguments already; it records only new tensors.
        for tensor in (*tree_leaves(out), *saved):
            if isinstance(tensor, torch.Tensor):
                tracker.register_new_storages(tensor)
        return out
