"""Chunked cross entropy (``Recipe.loss="chunked"``): head matmul and loss of one chunk at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from shardscope.memory.activations.head import LOSS_CHUNK_TOKENS
from shardscope.training.micro_batches import IGNORED_LABEL

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

LogitsTransform = Callable[[torch.Tensor], torch.Tensor]
"""A family's transformation of logits before the loss."""


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    chunk_tokens: int = LOSS_CHUNK_TOKENS,
    bias: torch.Tensor | None = None,
    transform: LogitsTransform | None = None,
) -> torch.Tensor:
    """Return the summed cross entropy of ``hidden`` [tokens, hidden_size] against ``labels`` [tokens].

    ``weight`` is the head's, [vocabulary, hidden_size]. Labels of -100 are ignored. Only the logits of one
    chunk exist at a time, in forward and in backward, which recomputes them. ``transform`` is the family's
    transformation of logits before the loss.
    """
    # In fp32, as the logits: a sum over thousands of tokens loses the last ones in bf16.
    total = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, hidden.shape[0], chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        # Recomputed in backward, so that the logits of one chunk are freed before those of the next exist.
        chunk_loss = checkpoint(
            _compute_chunk_loss, hidden[chunk], weight, labels[chunk], bias, transform, use_reentrant=False
        )
        total = total + chunk_loss
    return total


def _compute_chunk_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    transform: LogitsTransform | None,
) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    if transform is not None:
        logits = transform(logits)
    logits = logits.float()  # Reuse the name, so that the logits before the cast are freed.
    return F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")


def apply_chunked_loss(model: torch.nn.Module) -> None:
    """Make a transformers causal ``model`` return only its loss, computed in chunks.

    Its ``forward`` is replaced, not its ``__call__``: the hooks of frameworks and peft's wrapper still work.
    """
    from transformers import PreTrainedModel

    assert isinstance(model, PreTrainedModel)
    model.forward = functools.partial(_run_forward, model)


def _run_forward(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    labels: torch.Tensor | None = None,
    logits_to_keep: torch.Tensor | None = None,
    **other_inputs: object,
) -> CausalLMOutput:
    """Return the loss, or without ``labels`` the logits at the positions ``logits_to_keep``."""
    from transformers.modeling_outputs import CausalLMOutput

    # The body without the head, whose matmul belongs to the chunks.
    inputs = {
        name: value for name, value in other_inputs.items() if name in ("attention_mask", "position_ids")
    }
    hidden = model.base_model(input_ids=input_ids, **inputs).last_hidden_state
    if labels is None:
        kept = hidden if logits_to_keep is None else hidden[:, logits_to_keep]
        logits, transform = model.get_output_embeddings()(kept), _find_logits_transform(model.config)
        return CausalLMOutput(logits=logits if transform is None else transform(logits))
    # Shift the labels; the last token has no next one (transformers 5.24, loss_utils.py, ForCausalLMLoss).
    next_labels = F.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:].flatten()
    head = model.get_output_embeddings()
    total = chunked_cross_entropy(
        hidden.flatten(0, 1),
        head.weight,
        next_labels,
        bias=head.bias,
        transform=_find_logits_transform(model.config),
    )
    return CausalLMOutput(loss=total / (next_labels != IGNORED_LABEL).sum())


def _find_logits_transform(config: PreTrainedConfig) -> LogitsTransform | None:
    """Return the family's transformation of logits: Granite's scale, Gemma's soft cap; None for others."""
    scale, cap = getattr(config, "logits_scaling", None), getattr(config, "final_logit_softcapping", None)
    if scale:
        return lambda logits: logits / scale
    if cap:
        return lambda logits: torch.tanh(logits / cap) * cap
    return None
