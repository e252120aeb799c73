"""One process to compare with: its model, data and gradients, and comparisons of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType, ModuleType

import torch
import torch.nn.functional as F  # noqa: N812

TOLERANCE = 1e-4
"""Largest relative difference from one process: ranks add the same numbers in another order."""
WIDTH, NUM_LAYERS, BATCH = 32, 6, 8


def is_near(value: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    """Return whether two tensors differ by at most ``tolerance`` of the largest expected number."""
    if value.shape != expected.shape:
        return False
    # A comparison with NaN is False.
    limit = tolerance * float(expected.detach().abs().max()) + 1e-12
    return bool((value.detach() - expected.detach()).abs().max() <= limit)


def all_near(values: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], factor: float = 1.0) -> bool:
    """Return whether all tensors are ``factor`` times the expected ones."""
    return all(is_near(one, factor * other) for one, other in zip(values, expected, strict=True))


def list_names(names: Iterable[str]) -> str:
    """Return some names for a sentence: the first three, and how many more."""
    listed = list(names)
    more = len(listed) - 3
    return ", ".join(listed[:3]) + (f" and {more} more" if more > 0 else "")


def build_layers(seed: int) -> torch.nn.Sequential:
    """Return six layers of equal size, the same on every rank."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))


def make_batch(rank: int, step: int = 0, width: int | None = None) -> torch.Tensor:
    """Return the batch of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    return torch.randn(BATCH, width or WIDTH, generator=generator)


def compute_gradients(model: torch.nn.Module, rank: int, step: int = 0) -> list[torch.Tensor]:
    """Return the gradients of the model on one rank's batch."""
    batch = make_batch(rank, step)
    loss = F.mse_loss(model(batch), batch.flip(1))
    return list(torch.autograd.grad(loss, list(model.parameters())))


def average(gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the mean over ranks of each gradient: that of the whole batch, as all have equally many rows."""
    return [torch.stack(list(one)).mean(0) for one in zip(*gradients, strict=True)]


def find_tensors(root: object, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that ``root`` holds, in attributes and containers, without parameters and gradients.

    Step counts and other single numbers are left out.
    """
    known = {one.untyped_storage().data_ptr() for one in parameters}
    known |= {one.grad.untyped_storage().data_ptr() for one in parameters if one.grad is not None}
    tensors: list[torch.Tensor] = []
    queue, seen = [root], set[int]()
    while queue:
        one = queue.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            pointer = one.untyped_storage().data_ptr()
            if one.numel() > 1 and pointer not in known:
                known.add(pointer)
                tensors.append(one)
        elif isinstance(one, Mapping):
            queue.extend(one.values())
        elif isinstance(one, list | tuple | set | frozenset):
            queue.extend(one)
        elif hasattr(one, "__dict__") and not isinstance(one, type | ModuleType | FunctionType):
            queue.extend(vars(one).values())
    return tensors
