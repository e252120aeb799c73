"""The exercise on ZeRO-1: an optimizer whose state is sharded over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shardscope.teach.rank_checks.collectives import Call, CollectiveCounter, describe_calls
from shardscope.teach.rank_checks.comparison import (
    all_near,
    average,
    build_layers,
    compute_gradients,
    find_tensors,
    is_near,
    list_names,
)
from shardscope.teach.rank_checks.learner import Learner, ProblemError

LEARNING_RATE = 1e-2
NUM_STEPS = 3
MAX_STATE_SHARE = 0.8
"""A rank's state over the whole one: half, and the rest for shares that do not divide evenly."""
MAX_TRAFFIC = 1.5
"""Bytes that step() sends over those of the parameters."""


class Optimizer(Protocol):
    """An instance of the learner's class."""

    def step(self) -> object:
        """Update all parameters on this rank."""


class MakeOptimizer(Protocol):
    """The learner's class."""

    def __call__(self, parameters: list[torch.nn.Parameter], learning_rate: float) -> Optimizer:
        """Create the optimizer of this rank's share."""


def check_sharded_optimizer(learner: Learner, answer: MakeOptimizer) -> str:
    """Compare parameters with AdamW of one process, and this rank's state with the whole one."""
    model, alone = build_layers(seed=0), build_layers(seed=0)
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    reference = torch.optim.AdamW(alone.parameters(), lr=LEARNING_RATE)
    optimizer: list[Optimizer] = []
    learner.call(lambda: optimizer.append(answer(parameters, LEARNING_RATE)))
    calls: list[Call] = []
    for step in range(NUM_STEPS):
        ranks = range(learner.world_size)
        gradients = average([compute_gradients(alone, rank, step) for rank in ranks])
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter, other, gradient in zip(parameters, alone.parameters(), gradients, strict=True):
            parameter.grad, other.grad = gradient.clone(), gradient
        with CollectiveCounter() as counter:
            learner.call(optimizer[0].step)
        reference.step()
        calls = counter.calls
        _compare_parameters(names, parameters, list(alone.parameters()), before)
    whole = sum(2 * parameter.numel() * parameter.element_size() for parameter in parameters)
    state = sum(tensor.numel() * tensor.element_size() for tensor in find_tensors(optimizer[0], parameters))
    share = f"The parameters are right, but rank {learner.rank} holds {state:,} of {whole:,} bytes of state"
    if state >= whole:
        raise ProblemError(f"{share}. ZeRO-1 keeps a part on each rank.")
    if state > MAX_STATE_SHARE * whole:
        raise ProblemError(f"{share}. Give the ranks equally many numbers, not equally many tensors.")
    traffic, size = sum(call.num_bytes for call in calls), whole // 2
    if traffic > MAX_TRAFFIC * size:
        raise ProblemError(
            f"The parameters are right, but a step sends {traffic:,} bytes: {describe_calls(calls)}. The "
            f"updated parameters have {size:,}; gradients are averaged already, and state stays where it is."
        )
    return (
        f"After {NUM_STEPS} steps both ranks have the parameters of one process; rank {learner.rank} holds "
        f"{100 * state / whole:.0f} % of the state, and a step made {describe_calls(calls)}."
    )


def _compare_parameters(
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
) -> None:
    """Raise :class:`ProblemError` with the cause of a difference, if it is a known one."""
    if all_near(parameters, expected):
        return
    if all_near(parameters, before):
        raise ProblemError("step() changes no parameter on this rank.")
    old = [name for name, one, was in zip(names, parameters, before, strict=True) if is_near(one, was, 1e-9)]
    if old:
        raise ProblemError(
            f"This rank still has the old values of {list_names(old)}: the rank that updates them has to "
            "send them."
        )
    wrong = [
        name for name, one, right in zip(names, parameters, expected, strict=True) if not is_near(one, right)
    ]
    raise ProblemError(
        f"Other parameters than those of torch.optim.AdamW in one process: {list_names(wrong)}. Does every "
        "parameter have exactly one owner, the same on all ranks, and does it get lr=learning_rate?"
    )
