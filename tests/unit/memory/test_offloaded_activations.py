"""Test of activations in host memory: each copy is freed after the last operator that needs it."""

from __future__ import annotations

import weakref

import pytest
from tests.requirements import needs_installed

pytestmark = needs_installed("torch")


def test_host_copies_are_freed_one_by_one_during_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from shardscope.training.model import recompute

    alive: weakref.WeakSet[object] = weakref.WeakSet()
    initialize = recompute._HostCopy.__init__
    numbers_alive: list[int] = []

    def initialize_and_track(self: object, *arguments: object) -> None:
        initialize(self, *arguments)  # type: ignore[arg-type]
        alive.add(self)

    monkeypatch.setattr(recompute._HostCopy, "__init__", initialize_and_track)

    class Layer(torch.nn.Module):
        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                numbers = numbers.sigmoid()
                # Backward calls the hook before it reaches the previous operator.
                numbers.register_hook(lambda _: numbers_alive.append(len(alive)))
            return numbers

    layers = torch.nn.ModuleList([Layer()])
    assert recompute.apply_recompute(layers, "offload") == 1
    layers[0](torch.ones(8, requires_grad=True)).sum().backward()
    assert numbers_alive == [4, 3, 2, 1] and not alive
