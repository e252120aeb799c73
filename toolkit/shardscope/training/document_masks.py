"""Attention masks that separate the documents of packed windows, one tensor per micro-batch.

SDPA converts a boolean mask to numbers, and autocast casts a mask of another type. Both happen in each layer,
and each layer would save a mask of its own (ATen/native/transformers/attention.cpp,
``convert_boolean_attn_mask``; ATen/autocast_mode.h). An additive mask in the compute dtype is passed on
unchanged: transformers returns a 4-D mask as it is (5.24, masking_utils.py, ``_preprocess_mask_arguments``),
and all layers save the same tensor. It has ``micro_batch_size x seq_len x seq_len`` elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardscope.core.ops import ceil_div
from shardscope.memory.activations.forward import MASK_ALIGNMENT

if TYPE_CHECKING:
    from shardscope.core.recipe import Recipe


def add_document_mask(
    micro: dict[str, torch.Tensor], recipe: Recipe, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return ``micro`` with positions and a mask of documents if ``recipe`` packs, else unchanged.

    A document begins where ``position_ids`` are 0; without position ids each row is one document. ``dtype``
    is that of the matmuls.
    """
    if not recipe.packing or recipe.attention == "flash" or "attention_mask" in micro:
        return micro
    positions = micro.get("position_ids")
    if positions is None:
        ids = micro["input_ids"]
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape).contiguous()
    return {**micro, "position_ids": positions, "attention_mask": build_document_mask(positions, dtype)}


def build_document_mask(position_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask of causal attention inside each document: 0, or the least number.

    ``position_ids``: ``[rows, seq_len]``, 0 at the first token of a document. The mask has the shape
    ``[rows, 1, seq_len, seq_len]``.
    """
    rows, seq_len = position_ids.shape
    width = ceil_div(seq_len, MASK_ALIGNMENT) * MASK_ALIGNMENT
    mask = torch.zeros((rows, 1, seq_len, width), dtype=dtype, device=position_ids.device)[..., :seq_len]
    # A key is hidden if it is later, or if its document began before the query's: a token at position p sees
    # itself and the p keys before it.
    indices = torch.arange(seq_len, device=position_ids.device)
    first = indices - position_ids
    for row in range(rows):
        # One row at a time: booleans of all rows would be half as large again as the mask.
        hidden = (indices > indices[:, None]) | (indices < first[row][:, None])
        mask[row, 0].masked_fill_(hidden, torch.finfo(dtype).min)
    return mask
