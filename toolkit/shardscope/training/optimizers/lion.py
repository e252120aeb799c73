"""Lion (Chen et al. 2023, algorithm 2), which torch does not have: one momentum a weight, and its sign."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):  # type: ignore[misc]
    """``update = sign(beta1 m + (1 - beta1) g)``, ``m = beta2 m + (1 - beta2) g``, decoupled weight decay.

    Tensor by tensor, with one temporary of the tensor's size. Takes DTensors as well.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> Any:
        """One update of every weight that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        update = state["exp_avg"].lerp(parameter.grad, 1 - beta1).sign_()
        parameter.add_(update, alpha=-group["lr"])
        state["exp_avg"].lerp_(parameter.grad, 1 - beta2)
