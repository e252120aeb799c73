"""The optimizers that a recipe names, over whatever parameters a framework left on this rank."""

from __future__ import annotations

from typing import Any

import torch

DEFAULT_LEARNING_RATE = 3e-4
DEFAULT_WEIGHT_DECAY = 0.1
ADAM_BETAS = (0.9, 0.95)
"""Llama (arXiv:2302.13971 section 2.3) and most since."""
FUSED_DEVICES = ("cuda", "cpu")
"""Where ``torch.optim.AdamW(fused=True)`` has a kernel that we have run."""
SGD_MOMENTUM = 0.9
"""One moment a weight, which is what the planner counts for "sgd"."""


def build_optimizer(
    name: str,
    parameters: list[torch.nn.Parameter],
    learning_rate: float = DEFAULT_LEARNING_RATE,
    weight_decay: float = DEFAULT_WEIGHT_DECAY,
) -> torch.optim.Optimizer:
    """``torch.optim`` for ``Recipe.optimizer``; vectors (norms, biases) are not decayed."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if name == "adamw":
        # One kernel for all weights where torch has it; its default on a CPU makes ten passes over memory.
        fused = all(parameter.device.type in FUSED_DEVICES for parameter in parameters)
        return torch.optim.AdamW(groups, lr=learning_rate, betas=ADAM_BETAS, fused=fused)
    if name == "adamw_foreach":
        return torch.optim.AdamW(groups, lr=learning_rate, betas=ADAM_BETAS, foreach=True)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate, momentum=SGD_MOMENTUM)
    raise ValueError(
        f"Recipe.optimizer is {name!r}; allowed on this engine: 'adamw', 'sgd'. Nearest fix: 'adamw', or "
        "give engine.setup a build_optimizer of your own."
    )
