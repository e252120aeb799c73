"""``torch.optim.Muon`` for hidden matrices and AdamW for all else, as one optimizer (Jordan et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardscope.training.model.recompute import decoder_layers


def hidden_matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return Muon's parameters: trainable matrices inside the layers, without fused (3-D) experts."""
    parameters = {p: None for layer in decoder_layers(model) for p in layer.parameters()}
    return [p for p in parameters if p.ndim == 2 and p.requires_grad]


class MuonWithAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """Muon and AdamW as one optimizer, which shares their parameter groups and state for checkpoints.

    Muon's updates are scaled to AdamW's size (arXiv:2502.16982, section 2.2): one learning rate serves both.
    """

    def __init__(
        self,
        hidden: list[torch.nn.Parameter],
        rest: list[dict[str, Any]],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
    ) -> None:
        self._parts: list[torch.optim.Optimizer] = []
        if hidden:
            self._parts.append(
                torch.optim.Muon(hidden, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            )
        if rest:
            self._parts.append(torch.optim.AdamW(rest, lr=lr, betas=betas, fused=True))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share_state()

    def _share_state(self) -> None:
        start = 0
        for part in self._parts:
            end = start + len(part.param_groups)
            part.param_groups = self.param_groups[start:end]
            part.state = self.state
            start = end

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state, and share it with both optimizers again."""
        super().load_state_dict(state_dict)
        self._share_state()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Run a step of both optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def build_muon(
    model: torch.nn.Module,
    parameters: Iterable[torch.nn.Parameter],
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
) -> MuonWithAdamW:
    """Build it for the trainable ``parameters`` of ``model``, without weight decay on vectors."""
    hidden = hidden_matrices(model)
    hidden_set = set(hidden)
    rest = [parameter for parameter in parameters if parameter not in hidden_set]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    return MuonWithAdamW(hidden, [group for group in groups if group["params"]], lr, weight_decay, betas)
