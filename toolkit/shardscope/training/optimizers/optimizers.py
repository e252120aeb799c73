"""Optimizers of ``Recipe.optimizer``, built from the parameters or shards of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import overload

import torch
from torch.distributed.tensor import DTensor

from shardscope.core.errors import Value, refuse
from shardscope.training.optimizers.muon import MuonWithAdamW, list_hidden_matrices

DEFAULT_LEARNING_RATE = 3e-4
DEFAULT_WEIGHT_DECAY = 0.1
ADAM_BETAS = (0.9, 0.95)
"""Betas of Llama (arXiv:2302.13971 section 2.3) and most later models."""
FUSED_DEVICES = ("cuda", "cpu", "meta")
"""Devices on which ``torch.optim.AdamW(fused=True)`` is tested; meta weights are moved to one of them."""
SGD_MOMENTUM = 0.9
"""Momentum of "sgd": one moment per weight, as the planner counts."""
BITSANDBYTES = ("adamw_8bit", "paged_adamw", "paged_adamw_8bit")
"""Optimizers from bitsandbytes for plain tensors; for DTensors the 8-bit one is torchao's."""


def build_optimizer(
    name: str,
    parameters: list[torch.nn.Parameter],
    learning_rate: float = DEFAULT_LEARNING_RATE,
    weight_decay: float = DEFAULT_WEIGHT_DECAY,
    model: torch.nn.Module | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer of ``Recipe.optimizer``, without weight decay on vectors (norms, biases).

    ``model`` identifies hidden matrices (Muon) and embeddings (8-bit). Raises ``ValueError`` for an unknown
    name, and for ``"muon"`` without a model.
    """
    if name == "muon":
        if model is None:
            refuse(
                "Recipe.optimizer", name, "another without the model whose layers it is for", Value("adamw")
            )
        hidden = list_hidden_matrices(model)
        hidden_set = set(hidden)
        rest = [parameter for parameter in parameters if parameter not in hidden_set]
        return MuonWithAdamW(
            hidden, _group_parameters(rest, weight_decay), learning_rate, weight_decay, ADAM_BETAS
        )
    groups = _group_parameters(parameters, weight_decay)
    if name == "adamw":
        # One kernel for all weights where torch has it; its default on a CPU makes ten passes over memory.
        fused = all(parameter.device.type in FUSED_DEVICES for parameter in parameters)
        return torch.optim.AdamW(groups, lr=learning_rate, betas=ADAM_BETAS, fused=fused)
    if name == "adamw_foreach":
        return torch.optim.AdamW(groups, lr=learning_rate, betas=ADAM_BETAS, foreach=True)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate, momentum=SGD_MOMENTUM)
    if name == "lion":
        return Lion(groups, lr=learning_rate)
    if name == "adafactor":
        return torch.optim.Adafactor(groups, lr=learning_rate)
    if name in BITSANDBYTES:
        is_sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        return _build_quantized(name, groups, learning_rate, model, is_sharded=is_sharded)
    raise ValueError(
        f"Recipe.optimizer is {name!r}; allowed on this engine: 'adamw', 'adamw_foreach', 'sgd', 'lion', "
        "'adafactor', 'muon'. Nearest fix: 'adamw', or give engine.setup a build_optimizer of your own."
    )


def _group_parameters(
    parameters: Iterable[torch.nn.Parameter], weight_decay: float
) -> list[dict[str, object]]:
    """Return ``torch.optim``'s groups: matrices with ``weight_decay``, vectors without; none is empty."""
    parameters = list(parameters)
    groups: list[dict[str, object]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _build_quantized(
    name: str,
    groups: list[dict[str, object]],
    learning_rate: float,
    model: torch.nn.Module | None,
    *,
    is_sharded: bool,
) -> torch.optim.Optimizer:
    """Build AdamW of torchao (for DTensors) or bitsandbytes."""
    # Imported by name: neither library annotates its constructors.
    if is_sharded:
        torchao_optim = import_module("torchao.optim")
        sharded: torch.optim.Optimizer = torchao_optim.AdamW8bit(groups, lr=learning_rate, betas=ADAM_BETAS)
        return sharded
    bitsandbytes = import_module("bitsandbytes")
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    # Reset it: it stores overrides by id(tensor), and ids are reused.
    manager.initialize()
    embeddings = getattr(model, "get_input_embeddings", None)
    if embeddings is not None and name.endswith("8bit"):
        # 32-bit state for embeddings, as recommended (Dettmers et al. 2022, section 2.3) and in transformers'
        # Trainer.
        manager.register_module_override(embeddings(), "weight", {"optim_bits": 32})
    kinds = {
        "adamw_8bit": bitsandbytes.optim.AdamW8bit,
        "paged_adamw": bitsandbytes.optim.PagedAdamW,
        "paged_adamw_8bit": bitsandbytes.optim.PagedAdamW8bit,
    }
    optimizer: torch.optim.Optimizer = kinds[name](groups, lr=learning_rate, betas=ADAM_BETAS)
    return optimizer


# ---- Lion (Chen et al. 2023, algorithm 2), which torch does not have: one momentum a weight, and its sign


class Lion(torch.optim.Optimizer):
    """``update = sign(beta1 m + (1 - beta1) g)``, ``m = beta2 m + (1 - beta2) g``, decoupled weight decay.

    Tensor by tensor, with one temporary of the tensor's size. Takes DTensors as well.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, object]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every weight that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_parameter(parameter, group["lr"], group["betas"], group["weight_decay"])
        return loss

    def _update_parameter(
        self, parameter: torch.Tensor, lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        beta1, beta2 = betas
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        # Decoupled, as in AdamW: the decay is not part of the gradient, whose sign is taken.
        if weight_decay:
            parameter.mul_(1 - lr * weight_decay)
        update = state["exp_avg"].lerp(parameter.grad, 1 - beta1).sign_()
        parameter.add_(update, alpha=-lr)
        state["exp_avg"].lerp_(parameter.grad, 1 - beta2)
