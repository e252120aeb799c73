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
    """Rows with unlike numbers of labels: micro-batches, and ranks' shares of data, weigh differently."""
    tokens = torch.randint(0, 64, (ROWS, 64), generator=torch.Generator().manual_seed(step))
    labels = tokens.clone()
    for row in range(ROWS):
        labels[row, : 9 * row] = -100
    return {"input_ids": tokens, "labels": labels}


@functools.cache
def plain_torch(architecture: Architecture) -> dict[str, list[float]]:
    """The same of :func:`whole_batch`."""
    return train_in_one_process(architecture, map(whole_batch, range(NUM_STEPS)))


def train_in_one_process(
    architecture: Architecture, batches: Iterable[dict[str, Any]], optimizer_name: str = "adamw"
) -> dict[str, list[float]]:
    """The loss and the gradient's norm of a step on each batch: plain autograd, no engine."""
    from shardscope.training.model.model import build_model
    from shardscope.training.optimizers.optimizers import build_optimizer

    torch.manual_seed(0)
    model = build_model(architecture)
    optimizer = build_optimizer(optimizer_name, list(model.parameters()), RATE)
    losses, norms = [], []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms}
