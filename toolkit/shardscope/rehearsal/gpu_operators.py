"""CUDA's operators on fake CPU tensors.

A build of torch without CUDA has no autograd for fake CUDA tensors, and on CPU tensors attention, dropout and
autocast dispatch to other operators, which save other tensors. The functions here dispatch as on CUDA.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Concatenate, ParamSpec, Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from shardscope.rehearsal.patching import Patch, patch_attributes

P = ParamSpec("P")
_HALF = (torch.bfloat16, torch.float16)
_MAX_FLASH_HEAD_DIM = 256
"""Widest head of the flash kernel (torch 2.13, sdp_utils.cpp, check_head_dim_size_flash)."""


class LayerNorm(Protocol):
    """Signature of ``torch.nn.functional.layer_norm``."""

    def __call__(
        self,
        input: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> torch.Tensor: ...


class GroupedMm(Protocol):
    """Signature of ``torch.nn.functional.grouped_mm``."""

    def __call__(
        self,
        mat_a: torch.Tensor,
        mat_b: torch.Tensor,
        *,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor: ...


@contextlib.contextmanager
def gpu_operators(*, has_flash: bool = True) -> Iterator[None]:
    """Dispatch attention, dropout, powers and grouped matmuls as on CUDA, also during recomputation.

    ``has_flash``: whether the GPU has flash attention (:attr:`Gpu.has_flash_attention`).

    Functions are replaced instead of using a ``TorchFunctionMode``, which is off during backward.
    """
    # Dynamo reads the ``__name__`` of every function that torch lets subclasses override; a partial has none.
    dispatch_attention = functools.update_wrapper(
        functools.partial(_dispatch_attention, has_flash), _dispatch_attention
    )
    stand_ins: list[Patch] = [
        (F, "scaled_dot_product_attention", dispatch_attention),
        (F, "dropout", _apply_dropout),
        (F, "layer_norm", _wrap_layer_norm(F.layer_norm)),
        *((owner, name, _wrap_power(getattr(owner, name))) for owner, name in _POWERS),
        (torch, "is_autocast_enabled", _wrap_autocast_state(torch.is_autocast_enabled)),
    ]
    with patch_attributes(stand_ins), grouped_matmuls():
        yield


@contextlib.contextmanager
def grouped_matmuls() -> Iterator[None]:
    """Allow grouped matmuls (routed experts) in any type: on fake tensors torch supports bf16 only."""
    with patch_attributes([(F, "grouped_mm", _wrap_grouped_mm(F.grouped_mm))]):
        yield


_POWERS: tuple[tuple[object, str], ...] = (
    (torch, "pow"),
    (torch.Tensor, "pow"),
    (torch.Tensor, "__pow__"),
    (torch, "square"),
    (torch.Tensor, "square"),
)
"""Functions that run as ``pow`` under autocast: ``square`` calls it internally."""


def _wrap_autocast_state(is_enabled: Callable[[str], bool]) -> Callable[[str], bool]:
    """Return the CPU's autocast state where no device is named, which means CUDA (Nemotron's norm)."""

    def is_cuda_autocast_enabled(device_type: str = "cpu") -> bool:
        return is_enabled(device_type)

    return is_cuda_autocast_enabled


def _wrap_power(
    power: Callable[Concatenate[torch.Tensor, P], torch.Tensor],
) -> Callable[Concatenate[torch.Tensor, P], torch.Tensor]:
    """Cast to fp32 under autocast: ``pow`` is in CUDA's fp32 list and not in the CPU's."""

    # ``torch.pow`` also takes a number as its base.
    def power_in_fp32(base: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu") and isinstance(base, torch.Tensor) and base.dtype in _HALF:
            base = base.float()
        return power(base, *args, **kwargs)

    return power_in_fp32


def _wrap_layer_norm(layer_norm: LayerNorm) -> LayerNorm:
    """Cast input and weights to fp32 under autocast, as CUDA does (ATen/autocast_mode.h, AT_FORALL_FP32)."""

    def layer_norm_in_fp32(
        input: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        # On a GPU the fp32 copies are saved for backward, not the half-precision input.
        if torch.is_autocast_enabled("cpu"):
            input = input.float()
            weight = None if weight is None else weight.float()
            bias = None if bias is None else bias.float()
        return layer_norm(input, normalized_shape, weight, bias, eps)

    return layer_norm_in_fp32


def _wrap_grouped_mm(grouped_mm: GroupedMm) -> GroupedMm:
    def grouped_mm_any_type(
        mat_a: torch.Tensor,
        mat_b: torch.Tensor,
        *,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        # Torch's own operator has the right shapes and saved tensors; it is replaced only where it raises.
        if mat_a.dtype == torch.bfloat16:
            return grouped_mm(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)
        return _GroupedMatmul.apply(mat_a, mat_b, offs)

    return grouped_mm_any_type


class _GroupedContext(Protocol):
    """The part of autograd's context that :class:`_GroupedMatmul` uses."""

    needs_input_grad: tuple[bool, ...]
    shapes: tuple[torch.Size, torch.Size, tuple[int, ...]]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...


class _GroupedMatmul(torch.autograd.Function):
    """Grouped matmul that saves as torch's own: rows if weights need gradients, weights if rows do."""

    apply: ClassVar[Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]]
    """Type of torch's own classmethod, which is not annotated."""

    @staticmethod
    def forward(
        ctx: _GroupedContext, rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor | None
    ) -> torch.Tensor:
        # The gradient of each operand needs the other one: with frozen weights the rows are not saved.
        trains_rows, trains_weights = ctx.needs_input_grad[:2]
        ctx.save_for_backward(rows if trains_weights else None, weights if trains_rows else None)
        ctx.shapes = rows.shape, weights.shape, weights.stride()
        # transformers' own operator computes the right shapes on fake tensors (transformers 5.24,
        # integrations/moe.py, _grouped_mm_fallback_fake).
        product: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weights, offs)
        return product

    @staticmethod
    def backward(
        ctx: _GroupedContext, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        rows_shape, weights_shape, strides = ctx.shapes
        trains_rows, trains_weights = ctx.needs_input_grad[:2]
        return (
            grad.new_empty(rows_shape) if trains_rows else None,
            # The same strides as the weights: experts' matrices are passed transposed.
            grad.new_empty_strided(weights_shape, strides) if trains_weights else None,
            None,
        )


def _apply_dropout(
    x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Apply dropout as CUDA's kernel, which saves a mask of one byte per element."""
    if not training or p == 0:
        return x
    dropped: torch.Tensor = torch.native_dropout(x, p, True)[0]
    return dropped


def _dispatch_attention(
    has_flash: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run flash, memory-efficient or math attention, by the rules of ``sdp_utils.cpp`` (torch 2.13)."""
    # Autocast runs it in the lower precision (ATen/autocast_mode.h, AT_FORALL_LOWER_PRECISION_FP).
    if torch.is_autocast_enabled("cpu"):
        kind = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(kind), key.to(kind), value.to(kind)
    # The flash kernel takes half precision, equal widths up to a limit, and no mask.
    aten = torch.ops.aten
    same_widths = query.shape[-1] == key.shape[-1] == value.shape[-1]
    has_grouped_queries = key.shape[1] != query.shape[1]
    fits_flash = has_flash and query.dtype in _HALF and same_widths and query.shape[-1] <= _MAX_FLASH_HEAD_DIM
    if attn_mask is None and fits_flash:
        # The scale is that of the real width: the kernel sees only the padded one.
        padded, width = _pad_heads(query, key, value)
        out: torch.Tensor = aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, scale=scale or query.shape[-1] ** -0.5
        )[0]
        return out[..., :width]
    if has_grouped_queries or (query.dtype == torch.bfloat16 and not has_flash):
        # The memory-efficient kernel supports no grouped queries, and before Ampere no bf16. No other fused
        # kernel supports fp32 or a mask.
        return _attend_unfused(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    # With gradients enabled the kernel also returns the log-sum-exp that backward needs.
    bias = None if attn_mask is None else _convert_mask(attn_mask, query)
    attended: torch.Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
    return attended


def _pad_heads(*tensors: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], int]:
    """Pad heads to a multiple of eight, as SDPA does for flash attention; return them and the real width."""
    width = tensors[0].shape[-1]
    missing = -width % 8
    if not missing:
        return tensors, width
    return tuple(F.pad(tensor, (0, missing)) for tensor in tensors), width


def _convert_mask(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Convert a boolean mask to the operands' type and expand it to all heads, as SDPA does."""
    if mask.dtype == torch.bool:
        numbers = torch.zeros_like(mask, dtype=query.dtype)
        mask = numbers.masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], mask.shape[-1])


def _attend_unfused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    # CUDA's dropout saves a mask of one byte per score, the CPU's one of numbers (ATen/native/Dropout.cpp,
    # is_fused_kernel_acceptable). A given mask is saved as booleans.
    dropout_mask: torch.Tensor | None = None
    if dropout_p:
        num_scores = (*query.shape[:3], key.shape[2])
        dropout_mask = torch.ones(num_scores, dtype=torch.bool, device=query.device)
    # SDPA's autocast rule was applied by the caller; autocast is off inside SDPA.
    with torch.autocast("cpu", enabled=False):
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
            query,
            key,
            value,
            mask,
            dropout_p,
            is_causal,
            dropout_mask,
            scale=scale,
            enable_gqa=enable_gqa,
        )[0]
    return out
