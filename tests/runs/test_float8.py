"""torchao's float8 Linears on a CPU: what they keep, and what their casts take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from families import SHAPE
from test_saved_tensors import FULL, one_layer
from tests.operator_peak import Peak
from tests.requirements import needs, thorough

from shardscope.memory.activations.float8 import compute_linear_working

pytestmark = thorough()


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_float8_layer_saves_the_same_tensors_as_in_bf16(
    monkeypatch: pytest.MonkeyPatch, family: str, recompute: str
) -> None:
    float8: Any = needs("torchao.float8")
    import test_saved_tensors as counting

    recipe = replace(FULL, recompute=recompute)  # type: ignore[arg-type]
    # Rows of 16 numbers, as its products want.
    monkeypatch.setitem(SHAPE, "hidden_size", 192)
    monkeypatch.setitem(SHAPE, "intermediate_size", 240)
    plain = one_layer(family, "bf16", recipe)
    build = counting.build_model

    def convert_layer(*arguments: Any) -> torch.nn.Module:
        config = float8.Float8LinearConfig(emulate=True)
        model = build(*arguments).to(torch.bfloat16)
        made: torch.nn.Module = float8.convert_to_float8_training(
            model, config=config, module_filter_fn=lambda module, name: "lm_head" not in name
        )
        return made

    monkeypatch.setattr(counting, "build_model", convert_layer)
    assert one_layer(family, "bf16", recipe) == plain


def has_8_bit_product() -> bool:
    """Return whether torch multiplies 8-bit matrices here: not every build has this operator."""
    matrix, one = torch.zeros(32, 32).to(torch.float8_e4m3fn), torch.ones(())
    try:
        torch._scaled_mm(matrix, matrix.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError):
        return False
    return True


@pytest.mark.skipif(
    not has_8_bit_product(), reason="this build of torch has no 8-bit product on a CPU: pip install -U torch"
)
@pytest.mark.parametrize(
    ("tokens", "inner", "out"), [(256, 32, 32), (256, 32, 64), (256, 64, 32), (32, 64, 128)]
)
def test_casts_of_a_float8_backward_take_the_predicted_bytes(tokens: int, inner: int, out: int) -> None:
    float8: Any = needs("torchao.float8")
    module = torch.nn.Sequential(torch.nn.Linear(inner, out, bias=False, dtype=torch.bfloat16))
    float8.convert_to_float8_training(module, config=float8.Float8LinearConfig())
    states = torch.randn(tokens, inner, dtype=torch.bfloat16, requires_grad=True)
    found = module(states)
    gradient = torch.ones_like(found)
    watch = Peak([states, found, gradient, *module.parameters()])
    with watch:
        found.backward(gradient)
    # The weight's own gradient comes last, when the input's cast is gone.
    assert watch.most == pytest.approx(compute_linear_working(tokens, out, inner), rel=0.01)


def test_arrays_give_the_same_bytes_as_numbers() -> None:
    tokens = np.array([1, 100, 4096], dtype=np.int64)
    assert compute_linear_working(tokens, 512, 2048).tolist() == [
        compute_linear_working(n, 512, 2048) for n in tokens.tolist()
    ]
