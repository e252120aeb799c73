"""The operators that CUDA would run, on fake tensors that say they are a CPU's.

A build of torch without CUDA has no autograd for fake CUDA tensors, and on CPU tensors attention, dropout and
autocast go other ways, which save other tensors. Here they go CUDA's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

_POWERS = frozenset({torch.pow, torch.Tensor.pow, torch.Tensor.__pow__})
_HALF = (torch.bfloat16, torch.float16)
_MAX_FLASH_HEAD_DIM = 256


class GpuOperators(TorchFunctionMode):  # type: ignore[misc]
    """Attention, dropout and powers as CUDA dispatches them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if function is F.dropout:
            return _dropout(*args, **kwargs)
        if function in _POWERS and torch.is_autocast_enabled("cpu"):
            # CUDA's autocast has pow in its fp32 list, a CPU's has not.
            args = tuple(
                arg.float() if isinstance(arg, torch.Tensor) and arg.dtype in _HALF else arg for arg in args
            )
        return function(*args, **kwargs)


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """CUDA's kernel keeps a mask of one byte a number."""
    if not training or p == 0:
        return x
    return torch.native_dropout(x, p, True)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash, memory-efficient or plain, by the rules of ``sdp_utils.cpp`` (torch 2.13)."""
    if torch.is_autocast_enabled("cpu"):
        kind = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(kind), key.to(kind), value.to(kind)
    aten = torch.ops.aten
    same_widths = query.shape[-1] == key.shape[-1] == value.shape[-1]
    grouped = key.shape[1] != query.shape[1]
    if attn_mask is None and query.dtype in _HALF and same_widths and query.shape[-1] <= _MAX_FLASH_HEAD_DIM:
        padded, width = _to_multiple_of_eight(query, key, value)
        out = aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, scale=scale or query.shape[-1] ** -0.5
        )[0]
        return out[..., :width]
    if grouped:
        # The memory-efficient kernel takes no grouped queries, and nothing else takes fp32 or a mask.
        return _plain(query, key, value, attn_mask, dropout_p, is_causal, scale)
    bias = None if attn_mask is None else _as_bias(attn_mask, query)
    out = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
    found: torch.Tensor = out
    return found


def _to_multiple_of_eight(*tensors: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], int]:
    """Flash attention's heads are multiples of eight wide; SDPA pads others."""
    width = tensors[0].shape[-1]
    missing = -width % 8
    if not missing:
        return tensors, width
    return tuple(F.pad(tensor, (0, missing)) for tensor in tensors), width


def _as_bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """SDPA turns a mask of booleans into numbers of the operands' type, and expands it to all heads."""
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
) -> torch.Tensor:
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query,
        key,
        value,
        mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )[0]
    return out
