"""The head's product and the loss a chunk of tokens at a time: ``Recipe.loss="chunked"``."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from shardscope.memory.head import LOSS_CHUNK_TOKENS

IGNORED = -100


def chunked_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_tokens: int = LOSS_CHUNK_TOKENS
) -> torch.Tensor:
    """Summed cross entropy of ``hidden`` [tokens, hidden_size] against ``labels`` [tokens].

    ``weight`` is the head's, [vocabulary, hidden_size]. Labels of -100 do not count. Logits of one chunk
    exist at a time, in forward and in backward, which computes them again.
    """
    total = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, hidden.shape[0], chunk_tokens):
        part = slice(start, start + chunk_tokens)
        total = total + checkpoint(_part, hidden[part], weight, labels[part], use_reentrant=False)
    return total


def _part(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
