"""Selective recomputation: hooks in a layer may run other operators in backward than in forward."""

from __future__ import annotations

from typing import Any

import pytest
from tests.requirements import needs

torch = needs("torch")

from shardscope.training.model.recompute import apply_recompute  # noqa: E402


class FetchesInBackward(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A layer whose weights are there in forward, and are fetched in its recomputation, as ZeRO-3 does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8, dtype=torch.float64)
        self.num_calls = 0
        self.linear.register_forward_pre_hook(self.fetch)

    def fetch(self, *inputs: object) -> None:
        self.num_calls += 1
        for _ in range(4 * (self.num_calls - 1)):
            torch.cat([torch.empty(3), torch.empty(3)]).narrow(0, 1, 2).clone()

    def forward(self, rows: object) -> object:
        return torch.tanh(self.linear(torch.tanh(rows)))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_gradients_are_those_without_recomputation(recompute: str) -> None:
    gradients = []
    for choice in ("none", recompute):
        torch.manual_seed(0)
        model = torch.nn.ModuleList([FetchesInBackward() for _ in range(2)])
        apply_recompute(model, choice)
        rows = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
        model[1](model[0](rows)).sum().backward()
        assert [layer.num_calls for layer in model] == [1 if choice == "none" else 2] * 2
        gradients.append([rows.grad, *(weight.grad for weight in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_function_that_the_layer_compiles_stays_compiled() -> None:
    graphs: list[object] = []

    def compile_graph(graph: Any, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    class Compiles(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.double = torch.compile(lambda rows: (2 * rows).relu(), backend=compile_graph)

        def forward(self, rows: Any) -> object:
            return self.double(rows) @ rows

    model = torch.nn.ModuleList([Compiles()])
    apply_recompute(model, "selective")
    model[0](torch.randn(4, 4, requires_grad=True)).sum().backward()
    assert graphs


class TwoMatmuls(torch.nn.Module):  # type: ignore[misc, name-defined]
    """The output of the second is cached, and no recomputation asks for it: backward does not need it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, rows: Any) -> object:
        return self.down(torch.tanh(self.up(rows)))


def test_a_second_backward_is_refused_as_torch_does() -> None:
    """It took the second matmul's output for the first's, and the gradients were wrong."""
    model = torch.nn.ModuleList([TwoMatmuls()])
    apply_recompute(model, "selective")
    loss = model[0](torch.randn(4, 8, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        loss.backward()


def test_a_layer_may_run_higher_order_operators() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Attends(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, rows: Any) -> object:
            heads = rows.detach()[None, None]
            return torch.tanh(rows + flex_attention(heads, heads, heads)[0, 0])

    gradients = []
    for choice in ("none", "selective"):
        model = torch.nn.ModuleList([Attends()])
        apply_recompute(model, choice)
        torch.manual_seed(0)
        rows = torch.randn(16, 16, requires_grad=True)
        model[0](rows).sum().backward()
        gradients.append(rows.grad)
    assert torch.equal(*gradients)
