"""Replacements in rehearsals for Transformer Engine's modules, which cannot be loaded without CUDA.

Each saves for backward, and allocates in backward, what the real kernel does; nothing is computed. The code
around them is megatron-core's own. Without them, rehearsals would use megatron-core's "local" modules, which
store attention scores and are not used for training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, ClassVar, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardscope.frameworks.megatron.engine.cuda_as_cpu import patch_attribute

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from shardscope.rehearsal.tracker import Tracker

P = ParamSpec("P")
R = TypeVar("R")


class _Context(Protocol):
    """The part of autograd's context that the functions below use."""

    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


# The annotation of ``apply`` in each function is the type of torch's own classmethod, which has none.


class _Attention(torch.autograd.Function):
    """cuDNN's and FlashAttention's saved tensors: operands, output, one fp32 statistic per query and head."""

    apply: ClassVar[Callable[[Tensor, Tensor, Tensor], Tensor]]

    @staticmethod
    def forward(ctx: _Context, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # The output has the width of the values, which differs from that of queries in latent attention.
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        statistics = torch.empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, statistics)
        return out

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class FusedAttention(torch.nn.Module):
    """Replacement of ``TEDotProductAttention``, with contiguous operands as its kernels require."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Map inputs (sequence, batch, heads, width) to (sequence, batch, heads x width)."""
        return _Attention.apply(query.contiguous(), key.contiguous(), value.contiguous()).flatten(2)


class CausalSoftmax(torch.autograd.Function):
    """Replacement of ``ScaledUpperTriangMaskedSoftmax``: saves its output, and overwrites the incoming
    gradient with its own (apex, csrc/megatron/scaled_upper_triang_masked_softmax.h)."""

    @staticmethod
    def forward(ctx: _Context, scores: Tensor, scale: float) -> Tensor:
        out = torch.empty_like(scores)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def softmax_batch_per_block(query_len: int, key_len: int, batch: int, heads: int) -> int:
    """Return the rows that one block of the fused softmax processes (apex, scaled_masked_softmax.h)."""
    return 4 * (2 if key_len <= 128 else 1)


class _NormContext(_Context, Protocol):
    has_bias: bool


class _Norm(torch.autograd.Function):
    """Fused norm that saves its input and one fp32 statistic per token, for LayerNorm also the mean."""

    apply: ClassVar[Callable[[Tensor, Tensor, Tensor | None], Tensor]]

    @staticmethod
    def forward(ctx: _NormContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # RMSNorm, which has no bias, saves 1 / rms; LayerNorm saves the mean and 1 / deviation.
        num_statistics = 1 if bias is None else 2
        statistics = [torch.empty(x.shape[:-1], dtype=torch.float32) for _ in range(num_statistics)]
        ctx.save_for_backward(x, weight, *statistics)
        ctx.has_bias = bias is not None
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: _NormContext, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight, *_ = ctx.saved_tensors
        bias_gradient = torch.empty_like(weight) if ctx.has_bias else None
        return torch.empty_like(x), torch.empty_like(weight), bias_gradient


class FusedNorm(torch.nn.Module):
    """Replacement of ``TENorm``; supports sequence parallelism, unlike megatron-core's torch norm."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object
    ) -> None:
        super().__init__()
        self.weight = _make_norm_parameter(config, hidden_size)
        has_bias = config.normalization != "RMSNorm"
        self.bias = _make_norm_parameter(config, hidden_size) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape as ``x``."""
        return _Norm.apply(x, self.weight, self.bias)


def _make_norm_parameter(config: TransformerConfig, hidden_size: int) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
    # finalize_model_grads sums the partial gradients of parameters with this attribute over tp ranks.
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined,unused-ignore]
    return parameter


class _Rotary(torch.autograd.Function):
    """Rotary embedding that saves only the angles, which all layers share."""

    apply: ClassVar[Callable[[Tensor, Tensor], Tensor]]

    @staticmethod
    def forward(ctx: _Context, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return torch.empty(x.shape, dtype=x.dtype)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.empty(gradients[0].shape, dtype=gradients[0].dtype), None


class _EmbeddingContext(_Context, Protocol):
    weight: Tensor


class _Embedding(torch.autograd.Function):
    """Embedding that saves its indices and makes one gradient; on fake tensors PyTorch's makes two."""

    apply: ClassVar[Callable[[Tensor, Tensor], Tensor]]

    @staticmethod
    def forward(ctx: _EmbeddingContext, indices: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        # Detached, for the gradient's shape only: a saved weight would count as a saved tensor.
        ctx.weight = weight.detach()
        return weight.new_empty((*indices.shape, weight.shape[1]))

    @staticmethod
    def backward(ctx: _EmbeddingContext, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, torch.empty_like(ctx.weight)


def look_up_embedding(indices: Tensor, weight: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Replace ``torch.nn.functional.embedding``."""
    return _Embedding.apply(indices, weight)


def apply_fused_rotary(x: Tensor, angles: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Replace Transformer Engine's ``fused_apply_rotary_pos_emb``."""
    return _Rotary.apply(x, angles)


class DuplicatedLinear(torch.nn.Module):
    """Replacement of ``TELinear(parallel_mode="duplicated")``: every tp rank has the whole weight."""

    def __init__(self, inner: int, out: int, *, config: TransformerConfig, **kwargs: object) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.empty(out, inner, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined,unused-ignore]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Map (..., inner) to (..., out), without bias."""
        from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

        out = linear_with_grad_accumulation_and_async_allreduce(
            x, self.weight, None, self.config.gradient_accumulation_fusion, False, False
        )
        return out, None


class _GroupedProduct(torch.autograd.Function):
    """Grouped matmul of all experts in one kernel; weight gradients are added to the main gradients."""

    apply: ClassVar[Callable[[Tensor, *tuple[Tensor, ...]], Tensor]]

    @staticmethod
    def forward(ctx: _Context, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return x.new_empty((x.shape[0], weights[0].shape[0]))

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, ...]:
        from megatron.core.tensor_parallel import layers

        x, *weights = ctx.saved_tensors
        # megatron-core's DDP hook ignores the returned gradients of weights with this attribute
        # (distributed_data_parallel.py, _make_backward_post_hook), so one dummy per shape is enough.
        for weight in weights:
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined,unused-ignore]
        dummies = [layers.get_dummy_wgrad(list(weight.shape), weight.dtype) for weight in weights]
        return torch.empty_like(x), *dummies


class FusedExperts(torch.nn.Module):
    """Replacement of ``TEGroupedMLP``: all experts of a rank in two grouped matmuls."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *args: object, **kwargs: object
    ) -> None:
        super().__init__()
        self.config = config
        inner = config.moe_ffn_hidden_size // (config.expert_tensor_parallel_size or 1)
        branches = 2 if config.gated_linear_unit else 1
        self.fc1 = self._make_weights(num_local_experts, branches * inner, config.hidden_size)
        self.fc2 = self._make_weights(num_local_experts, config.hidden_size, inner)

    def _make_weights(self, num_local_experts: int, out: int, inner: int) -> torch.nn.ParameterList:
        weights = [
            torch.nn.Parameter(torch.empty(out, inner, dtype=self.config.params_dtype))
            for _ in range(num_local_experts)
        ]
        for weight in weights:
            # By this attribute DDP puts them in the buffers of the expert-data-parallel ranks.
            is_dense = self.config.expert_model_parallel_size == 1
            weight.allreduce = is_dense  # type: ignore[attr-defined,unused-ignore]
        return torch.nn.ParameterList(weights)

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probabilities: Tensor) -> tuple[Tensor, None]:
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
        with patch_attribute(torch, "compile", self._replace_compile):
            yield

    def _replace_compile(
        self, function: Callable[P, R] | None = None, **options: object
    ) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
        """Replace ``torch.compile``, as ``@torch.compile`` or as ``@torch.compile(...)``."""
        return self._fuse if function is None else self._fuse(function)

    def _fuse(self, function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def region(*args: P.args, **kwargs: P.kwargs) -> R:
            # A region that another one calls is part of the outer kernel.
            if self.tracker is None or self._inside:
                return function(*args, **kwargs)
            return self._run_region(self.tracker, function, *args, **kwargs)

        return region

    def _run_region(self, tracker: Tracker, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        saved: list[Tensor] = []

        def record_saved(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        # Run the operators one by one, unseen, and note which tensors autograd saves.
        self._inside = True
        try:
            with (
                tracker.pause(),
                torch.autograd.graph.saved_tensors_hooks(record_saved, lambda tensor: tensor),
            ):
                out = function(*args, **kwargs)
        finally:
            self._inside = False
        # The tracker knows the arguments already; it records only new tensors.
        for tensor in (*tree_leaves(out), *saved):
            if isinstance(tensor, Tensor):
                tracker.register_new_storages(tensor)
        return out
