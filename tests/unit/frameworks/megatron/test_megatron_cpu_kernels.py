"""What stands for CUDA's kernels on Megatron's CPU ranks: the same numbers, and nothing kept beside them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.needs import needs

torch = needs("torch")

from shardscope.frameworks.megatron.engine import cpu_ranks as cpu_kernels  # noqa: E402
from shardscope.frameworks.megatron.engine import engine as jit  # noqa: E402

functional = torch.nn.functional


def drawn(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made.requires_grad_()


def kept(make: Any) -> int:
    """Bytes of the storages that ``make()`` saves for backward."""
    storages: dict[int, int] = {}

    def see(tensor: Any) -> Any:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        held = make()
    assert held is not None
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 64), (5, 2, 64), (5, 2, 4, 16)])
def test_the_norm_is_torch_s(shape: tuple[int, ...], dtype: Any) -> None:
    found = []
    for norm in (functional.rms_norm, cpu_kernels.rms_norm):
        hidden, weight = drawn(*shape, dtype=dtype), drawn(shape[-1], dtype=dtype, seed=1)
        normed = norm(hidden, (shape[-1],), weight, 1e-5)
        assert normed.dtype == dtype
        (normed.float() * drawn(*shape, seed=2).detach()).sum().backward()
        found.append((normed.detach(), hidden.grad, weight.grad))
    loose = 1e-5 if dtype == torch.float32 else 2e-2
    for theirs, own in zip(*found, strict=True):
        assert own.dtype == theirs.dtype
        torch.testing.assert_close(own, theirs, rtol=loose, atol=loose)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_keeps_its_input_and_a_number_a_row(dtype: Any) -> None:
    hidden, weight = drawn(512, 64, dtype=dtype), drawn(64, dtype=dtype, seed=1)
    beside = 512 * 4 + weight.nbytes
    assert kept(lambda: cpu_kernels.rms_norm(hidden, (64,), weight, 1e-5)) == hidden.nbytes + beside
    assert kept(lambda: functional.rms_norm(hidden, (64,), weight, 1e-5)) > hidden.nbytes + 2 * beside


def test_a_norm_that_megatron_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="Megatron-core has no norm over"):
        cpu_kernels.rms_norm(drawn(2, 4), (4,), None, 1e-5)


def test_the_derivative_of_swiglu_is_autograd_s() -> None:
    both, gradient = drawn(9, 48), drawn(9, 24, seed=1).detach()
    gate, up = both.chunk(2, -1)
    (functional.silu(gate) * up).backward(gradient)
    torch.testing.assert_close(cpu_kernels.swiglu_back(gradient, both.detach()), both.grad)


@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize(("cc", "found"), [("", "gcc"), ("", None), ("icx", "icx"), ("icx", "gcc")])
def test_a_compiler_for_cuda_is_triton_and_one_of_c(
    has_triton: bool, cc: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: has_triton)
    monkeypatch.setattr(jit.shutil, "which", lambda name: f"/usr/bin/{name}" if name == found else None)
    monkeypatch.setenv("CC", cc)
    can = has_triton and found is not None and found == (cc or found)
    assert jit.can_compile.__wrapped__() is can


@pytest.mark.parametrize("can", [True, False])
def test_without_one_what_would_be_compiled_runs_as_it_is_written(
    can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[bool] = []

    def twice(tensor: Any) -> Any:
        called.append(torch.compiler.is_compiling())
        return 2 * tensor

    monkeypatch.setattr(jit, "can_compile", lambda: can)
    compiled = torch.compile(twice, backend=lambda graph, inputs: graph.forward)
    with jit.compile_if_possible():
        assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert called == [can]
