"""Hyperparameters for Megatron-core's optimizer, read from the recipe or from a torch optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardscope.core.errors import refuse
from shardscope.training.optimizers.optimizers import build_optimizer

if TYPE_CHECKING:
    from shardscope.training.engine import BuildOptimizer

CLASSES = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
"""``Recipe.optimizer`` -> the torch class with the same update as Megatron-core's."""
PER_GROUP = ("lr", "betas", "eps", "momentum")


@dataclass(frozen=True, kw_only=True)
class OptimizerNumbers:
    """Hyperparameters of AdamW or SGD with momentum; vectors (norms, biases) have no weight decay."""

    learning_rate: float
    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9


def read_optimizer_numbers(
    name: str,
    parameters: list[torch.nn.Parameter],
    build: BuildOptimizer | None,
    learning_rate: float,
    weight_decay: float,
) -> OptimizerNumbers:
    """Read the hyperparameters from the optimizer that ``build`` returns, or from the recipe's default.

    Megatron-core builds its own optimizer over its own buffers, so a torch optimizer only supplies
    hyperparameters. Raises ``ValueError`` for a class or parameter groups that Megatron-core cannot match.
    """
    optimizer = (
        build_optimizer(name, parameters, learning_rate, weight_decay) if build is None else build(parameters)
    )
    expected_class, groups = CLASSES[name], optimizer.param_groups
    if type(optimizer) is not expected_class:
        refuse(
            "build_optimizer",
            type(optimizer).__name__,
            f"a torch.optim.{expected_class.__name__}, whose hyperparameters Megatron-core's optimizer gets "
            f"(Recipe.optimizer is {name!r})",
            "build_optimizer=None, or layout=Layout.fsdp2()",
        )
    # megatron-core's optimizer has one value of each for all its parameters (OptimizerConfig).
    for key in PER_GROUP:
        if len({group.get(key) for group in groups}) > 1:
            refuse(
                "build_optimizer",
                f"groups that differ in {key}",
                f"one {key} for all groups with Megatron-core",
                key,
            )
    # It decays matrices only: vectors and biases are in a group of their own, without weight decay
    # (core 0.16, optimizer/__init__.py, get_standard_config_overrides).
    decays = {bool(p.ndim >= 2): group["weight_decay"] for group in groups for p in group["params"]}
    first = groups[0]
    for group in groups:
        for parameter in group["params"]:
            expected = decays.get(True, 0.0) if parameter.ndim >= 2 else 0.0
            if group["weight_decay"] != expected:
                refuse(
                    "build_optimizer",
                    f"weight_decay={group['weight_decay']} of a tensor of shape {tuple(parameter.shape)}",
                    "one decay for all matrices and none for vectors with Megatron-core",
                    "weight_decay=0.0 in a group of all tensors with fewer than two dimensions",
                )
    return OptimizerNumbers(
        learning_rate=first["lr"],
        weight_decay=decays.get(True, 0.0),
        betas=first.get("betas", (0.9, 0.999)),
        eps=first.get("eps", 1e-8),
        momentum=first.get("momentum", 0.0),
    )
