"""CUDA's operators on fake CPU tensors.

A build of torch without CUDA has no autograd for fake CUDA tensors, and on CPU tensors attention, dropout and
autocast dispatch to other operators, which save other tensors. The functions here dispatch as on CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from shardscope.rehearsal.replacing import replaced

_HALF = (torch.bfloat16, torch.float16)
_MAX_FLASH_HEAD_DIM = 256


@contextlib.contextmanager
def gpu_operators(*, has_flash: bool = True) -> Iterator[None]:
    """Dispatch attention, dropout, powers and grouped matmuls as on CUDA, also during recomputation.

    ``has_flash``: whether the GPU has flash attention (:attr:`Gpu.has_flash_attention`).

    Functions are replaced instead of using a ``TorchFunctionMode``, which is off during backward.
    """
    stand_ins: list[tuple[Any, str, Any]] = [
        (F, "scaled_dot_product_attention", _attention if has_flash else _attention_before_ampere),
        (F, "dropout", _dropout),
        (F, "layer_norm", _normalised_in_fp32(F.layer_norm)),
        *((owner, name, _in_fp32(getattr(owner, name))) for owner, name in _POWERS),
        (torch, "is_autocast_enabled", _asks_for_cuda(torch.is_autocast_enabled)),
    ]
    with replaced(stand_ins), grouped_products():
        yield


@contextlib.contextmanager
def grouped_products() -> Iterator[None]:
    """Allow grouped matmuls (routed experts) in any type: on fake tensors torch supports bf16 only."""
    with replaced([(F, "grouped_mm", _grouped_products(F.grouped_mm))]):
        yield


_POWERS: tuple[tuple[Any, str], ...] = (
    (torch, "pow"),
    (torch.Tensor, "pow"),
    (torch.Tensor, "__pow__"),
    (torch, "square"),
    (torch.Tensor, "square"),
)
"""Functions that run as ``pow`` under autocast: ``square`` calls it internally."""


def _asks_for_cuda(is_enabled: Any) -> Any:
    """Return the CPU's autocast state where no device is named, which means CUDA (Nemotron's norm)."""

    def enabled(device_type: str = "cpu") -> Any:
        return is_enabled(device_type)

    return enabled


def _in_fp32(power: Any) -> Any:
    """Cast to fp32 under autocast: ``pow`` is in CUDA's fp32 list and not in the CPU's."""

    def pow_(base: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu") and isinstance(base, torch.Tensor) and base.dtype in _HALF:
            base = base.float()
        return power(base, *args, **kwargs)

    return pow_


def _normalised_in_fp32(layer_norm: Any) -> Any:
    """Cast input and weights to fp32 under autocast, as CUDA does (ATen/autocast_mode.h, AT_FORALL_FP32)."""

    def normalised(x: torch.Tensor, shape: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return layer_norm(x, shape, *args, **kwargs)

        def wide(value: Any) -> Any:
            return value.float() if isinstance(value, torch.Tensor) else value

        wide_options = {name: wide(value) for name, value in kwargs.items()}
        return layer_norm(wide(x), shape, *map(wide, args), **wide_options)

    return normalised


def _grouped_products(grouped_mm: Any) -> Any:
    def products(rows: torch.Tensor, weights: torch.Tensor, *, offs: Any = None, **kwargs: Any) -> Any:
        if rows.dtype == torch.bfloat16:
            return grouped_mm(rows, weights, offs=offs, **kwargs)
        return _GroupedProduct.apply(rows, weights, offs)

    return products


class _GroupedProduct(torch.autograd.Function):  # type: ignore[misc]
    """Grouped matmul that saves as torch's own: rows if weights need gradients, weights if rows do."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, offs: Any) -> Any:
        trains_rows, trains_weights = ctx.needs_input_grad[:2]
        ctx.save_for_backward(rows if trains_weights else None, weights if trains_rows else None)
        ctx.shapes = rows.shape, weights.shape, weights.stride()
        # transformers' own operator computes the right shapes on fake tensors.
        return torch.ops.transformers.grouped_mm_fallback(rows, weights, offs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows_shape, weights_shape, strides = ctx.shapes
        trains_rows, trains_weights = ctx.needs_input_grad[:2]
        return (
            grad.new_empty(rows_shape) if trains_rows else None,
            # The same strides as the weights: experts' matrices are passed transposed.
            grad.new_empty_strided(weights_shape, strides) if trains_weights else None,
            None,
        )


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Apply dropout as CUDA's kernel, which saves a mask of one byte per element."""
    if not training or p == 0:
        return x
    return torch.native_dropout(x, p, True)[0]


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return _attend(True, query, key, value, *args, **kwargs)


def _attention_before_ampere(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return _attend(False, query, key, value, *args, **kwargs)


def _attend(
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
    if torch.is_autocast_enabled("cpu"):
        kind = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(kind), key.to(kind), value.to(kind)
    aten = torch.ops.aten
    same_widths = query.shape[-1] == key.shape[-1] == value.shape[-1]
    grouped = key.shape[1] != query.shape[1]
    fits_flash = has_flash and query.dtype in _HALF and same_widths and query.shape[-1] <= _MAX_FLASH_HEAD_DIM
    if attn_mask is None and fits_flash:
        padded, width = _to_multiple_of_eight(query, key, value)
        out = aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, scale=scale or query.shape[-1] ** -0.5
        )[0]
        return out[..., :width]
    if grouped or (query.dtype == torch.bfloat16 and not has_flash):
        # The memory-efficient kernel supports no grouped queries, and before Ampere no bf16. No other fused
        # kernel supports fp32 or a mask.
        return _plain(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    bias = None if attn_mask is None else _as_bias(attn_mask, query)
    out = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
    found: torch.Tensor = out
    return found


def _to_multiple_of_eight(*tensors: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], int]:
    """Pad heads to a multiple of eight, as SDPA does for flash attention; return them and the real width."""
    width = tensors[0].shape[-1]
    missing = -width % 8
    if not missing:
        return tensors, width
    return tuple(F.pad(tensor, (0, missing)) for tensor in tensors), width


def _as_bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Convert a boolean mask to the operands' type and expand it to all heads, as SDPA does."""
    if mask.dtype == torch.bool:
        numbers = torch.zeros_like(mask, dtype=query.dtype)
        mask = numbers.masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], mask.shape[-1])


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    # SDPA's autocast rule was applied by the caller; autocast is off inside SDPA.
    with torch.autocast("cpu", enabled=False):
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
            query,
            key,
            value,
            mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )[0]
    return out
