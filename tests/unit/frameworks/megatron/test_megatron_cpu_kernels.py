"""CPU versions of fused CUDA kernels: equal results and saved tensors. torch.compile without a compiler."""

from __future__ import annotations

from typing import Any

import pytest
from tests.requirements import needs

torch = needs("torch")

from shardscope.frameworks.megatron.engine import cpu_ranks as cpu_kernels  # noqa: E402
from shardscope.frameworks.megatron.engine import engine as jit  # noqa: E402

functional = torch.nn.functional


def random_tensor(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return tensor.requires_grad_()


def count_saved_bytes(make: Any) -> int:
    """Return the bytes of the storages that ``make()`` saves for backward."""
    storages: dict[int, int] = {}

    def record(tensor: Any) -> Any:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        result = make()
    assert result is not None
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 64), (5, 2, 64), (5, 2, 4, 16)])
def test_rms_norm_equals_torch(shape: tuple[int, ...], dtype: Any) -> None:
    available = []
    for norm in (functional.rms_norm, cpu_kernels.rms_norm):
        hidden, weight = random_tensor(*shape, dtype=dtype), random_tensor(shape[-1], dtype=dtype, seed=1)
        normed = norm(hidden, (shape[-1],), weight, 1e-5)
        assert normed.dtype == dtype
        (normed.float() * random_tensor(*shape, seed=2).detach()).sum().backward()
        available.append((normed.detach(), hidden.grad, weight.grad))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for theirs, own in zip(*available, strict=True):
        assert own.dtype == theirs.dtype
        torch.testing.assert_close(own, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_saves_its_input_and_one_number_per_row(dtype: Any) -> None:
    hidden, weight = random_tensor(512, 64, dtype=dtype), random_tensor(64, dtype=dtype, seed=1)
    other_bytes = 512 * 4 + weight.nbytes
    assert (
        count_saved_bytes(lambda: cpu_kernels.rms_norm(hidden, (64,), weight, 1e-5))
        == hidden.nbytes + other_bytes
    )
    assert (
        count_saved_bytes(lambda: functional.rms_norm(hidden, (64,), weight, 1e-5))
        > hidden.nbytes + 2 * other_bytes
    )


def test_rms_norm_without_weight_raises() -> None:
    with pytest.raises(ValueError, match="Megatron-core has no norm over"):
        cpu_kernels.rms_norm(random_tensor(2, 4), (4,), None, 1e-5)


def test_swiglu_backward_equals_autograd() -> None:
    gate_and_up, gradient = random_tensor(9, 48), random_tensor(9, 24, seed=1).detach()
    gate, up = gate_and_up.chunk(2, -1)
    (functional.silu(gate) * up).backward(gradient)
    torch.testing.assert_close(cpu_kernels.swiglu_back(gradient, gate_and_up.detach()), gate_and_up.grad)


@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize(("cc", "available"), [("", "gcc"), ("", None), ("icx", "icx"), ("icx", "gcc")])
def test_can_compile_needs_triton_and_a_c_compiler(
    has_triton: bool, cc: str, available: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: has_triton)
    monkeypatch.setattr(jit.shutil, "which", lambda name: f"/usr/bin/{name}" if name == available else None)
    monkeypatch.setenv("CC", cc)
    expected = has_triton and available is not None and available == (cc or available)
    assert jit.can_compile.__wrapped__() is expected


@pytest.mark.parametrize("expected", [True, False])
def test_without_a_compiler_compiled_functions_run_eagerly(
    expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[bool] = []

    def double(tensor: Any) -> Any:
        called.append(torch.compiler.is_compiling())
        return 2 * tensor

    monkeypatch.setattr(jit, "can_compile", lambda: expected)
    compiled = torch.compile(double, backend=lambda graph, inputs: graph.forward)
    with jit.compile_if_possible():
        assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert called == [expected]
