"""Layers compiled one by one: captured whole, once for all of them, and they compute what they did."""

from __future__ import annotations

import functools

import pytest
from tests.requirements import needs

torch = needs("torch")
needs("transformers")

from gloo_ranks import tiny_llama, tiny_plan  # noqa: E402

from shardscope.frameworks import limits  # noqa: E402
from shardscope.frameworks.registry import why_not_trained  # noqa: E402


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_layers_share_one_graph(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without inductor, which would make kernels of it."""
    from torch._dynamo.utils import counters

    from shardscope.training.model.compile_layers import check_compiled, compile_layers
    from shardscope.training.model.model import build_model
    from shardscope.training.model.recompute import apply_recompute

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model = build_model(tiny_llama())
    ids = torch.arange(32).reshape(2, 16)
    expected = model(input_ids=ids, labels=ids).loss
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    apply_recompute(model, recompute)
    compile_layers(model, "cpu")
    assert check_compiled(model, planned=True) == {"num_compiled_layers": 2}
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_a_disabled_compiler_contradicts_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile gives back what it was given, and the run would be an eager one."""
    from shardscope.training.model.compile_layers import check_compiled, compile_layers
    from shardscope.training.model.model import build_model

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    model = build_model(tiny_llama())
    compile_layers(model, "cpu")
    assert check_compiled(model, planned=False) == {"num_compiled_layers": 0}
    with pytest.raises(RuntimeError, match=r"kernels='compiled', and 0 of 2 .*TORCHDYNAMO_DISABLE"):
        check_compiled(model, planned=True)


@pytest.mark.parametrize("framework", ["ddp", "fsdp2"])
def test_compiling_without_a_compiler_raises(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny_plan(framework, 2, kernels="compiled")
    monkeypatch.setattr(limits.shutil, "which", lambda name: "/usr/bin/g++")
    assert why_not_trained(plan) is None
    monkeypatch.setattr(limits.shutil, "which", lambda name: None)
    assert "without a C++ compiler (g++, clang++)" in str(why_not_trained(plan))
