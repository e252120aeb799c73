"""Activations in host memory: each copy is there until the last operator that needs it, and no longer."""

from __future__ import annotations

import weakref

import pytest
from tests.requirements import needs_installed

pytestmark = needs_installed("torch")


def test_copies_go_one_by_one_while_backward_is_in_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from shardscope.training.model import recompute

    alive: weakref.WeakSet[object] = weakref.WeakSet()
    make = recompute._HostCopy.__init__
    seen: list[int] = []

    def made(self: object, *arguments: object) -> None:
        make(self, *arguments)  # type: ignore[arg-type]
        alive.add(self)

    monkeypatch.setattr(recompute._HostCopy, "__init__", made)

    class Layer(torch.nn.Module):
        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                numbers = numbers.sigmoid()
                # Called in backward before the operator in front of it is reached.
                numbers.register_hook(lambda _: seen.append(len(alive)))
            return numbers

    layers = torch.nn.ModuleList([Layer()])
    assert recompute.apply_recompute(layers, "offload") == 1
    layers[0](torch.ones(8, requires_grad=True)).sum().backward()
    assert seen == [4, 3, 2, 1] and not alive
