"""Reference for engines on several ranks: the same model and batches in one process."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from shardscope import Architecture

NUM_STEPS = 4
RATE = 1e-2
ROWS = 4


def whole_batch(step: int) -> dict[str, Any]:
    """Return rows with different numbers of labels: micro-batches and ranks have different weights."""
    tokens = torch.randint(0, 64, (ROWS, 64), generator=torch.Generator().manual_seed(step))
    labels = tokens.clone()
    for row in range(ROWS):
        labels[row, : 9 * row] = -100
    return {"input_ids": tokens, "labels": labels}


@functools.cache
def plain_torch(architecture: Architecture) -> dict[str, list[float]]:
    """Return :func:`train_in_one_process` on the batches of :func:`whole_batch`."""
    return train_in_one_process(architecture, map(whole_batch, range(NUM_STEPS)))


def train_in_one_process(
    architecture: Architecture, batches: Iterable[dict[str, Any]], optimizer_name: str = "adamw"
) -> dict[str, list[float]]:
    """Return the loss and the gradient's norm of each step: plain autograd, no engine."""
    from shardscope.training.model.model import build_model
    from shardscope.training.optimizers.optimizers import build_optimizer

    torch.manual_seed(0)
    model = build_model(architecture)
    optimizer = build_optimizer(optimizer_name, list(model.parameters()), RATE)
    losses, norms = take_steps(optimizer, (model(**batch).loss for batch in batches))
    return {"losses": losses, "norms": norms}


def take_steps(
    optimizer: torch.optim.Optimizer, losses: Iterable[torch.Tensor]
) -> tuple[list[float], list[float]]:
    """Take an optimizer step on each loss. Return the losses and the gradients' norms before clipping.

    ``losses`` is lazy: it computes each loss with the weights after the step before.
    """
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    values, norms = [], []
    for loss in losses:
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values, norms
