"""``torch.optim.Muon`` for hidden matrices and AdamW for all else, as one optimizer (Jordan et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, overload

import torch

from shardscope.training.model.recompute import list_decoder_layers

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict


def list_hidden_matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return Muon's parameters: trainable matrices inside the layers, without fused (3-D) experts."""
    parameters = {p: None for layer in list_decoder_layers(model) for p in layer.parameters()}
    return [p for p in parameters if p.ndim == 2 and p.requires_grad]


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer, which shares their parameter groups and state for checkpoints.

    Muon's updates are scaled to AdamW's size (arXiv:2502.16982, section 2.2): one learning rate serves both.
    """

    def __init__(
        self,
        hidden: list[torch.nn.Parameter],
        rest: list[dict[str, object]],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
    ) -> None:
        # torch's optimizers reject an empty list of parameters, which a pipeline stage may have.
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
        """Let both optimizers use this one's groups and state, so that a scheduler's rate reaches them."""
        start = 0
        for part in self._parts:
            end = start + len(part.param_groups)
            part.param_groups = self.param_groups[start:end]
            part.state = self.state
            start = end

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the state, and share it with both optimizers again."""
        super().load_state_dict(state_dict)
        self._share_state()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Run a step of both optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss
