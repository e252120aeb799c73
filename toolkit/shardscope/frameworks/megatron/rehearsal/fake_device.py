"""Megatron-core on fake CPU tensors, with its CUDA calls redirected to the CPU.

A rehearsal moves no data: data transfers and synchronization do nothing, and replacements of fused CUDA
kernels allocate no more temporaries than the kernels do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import torch
import torch.distributed as dist

from shardscope.frameworks.megatron.engine.cuda_as_cpu import (
    CudaMeansCpu,
    Replacement,
    Stream,
    TorchFunction,
    cuda_as_cpu,
    make_no_op,
)


def fake_device() -> contextlib.AbstractContextManager[None]:
    """Redirect megatron-core's CUDA calls to the CPU. Raises ``RuntimeError`` if this process uses CUDA."""
    return cuda_as_cpu("The rehearsal of Megatron-core", _FakeValues(), _list_fake_replacements)


class _FakeValues(CudaMeansCpu):
    """Function mode in which ``item()`` works on fake tensors, which have no values."""

    def __torch_function__(
        self,
        function: TorchFunction,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if function is torch.Tensor.item:
            # Megatron reads norms and inf flags, which are 0 here, and the index of a mask, which is 1.
            tensor = args[0]
            assert isinstance(tensor, torch.Tensor)
            return 0.0 if tensor.is_floating_point() else 1
        return super().__torch_function__(function, types, args, kwargs)


def _list_fake_replacements() -> list[Replacement]:
    from megatron.core import optimizer as optimizers
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.tensor_parallel import layers, random

    dummies: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}

    # Stand-ins for functions that read values or need CUDA.
    def get_dummy_gradient(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
        """Return the cached gradient of a shape, as Transformer Engine's get_dummy_wgrad (module/base.py)."""
        key = (tuple(shape), dtype)
        if key not in dummies:
            dummies[key] = torch.empty(shape, dtype=dtype)
        return dummies[key].detach()

    def copy_object(objects: list[object], value: object, group: dist.ProcessGroup | None = None) -> None:
        objects[:] = [value] * len(objects)

    def skip_coalescing(*args: object, **kwargs: object) -> contextlib.nullcontext[Stream]:
        # The caller waits on what the context yields; a Stream has a ``wait`` that returns at once.
        return contextlib.nullcontext(Stream())

    # The weight-gradient kernels add into the main gradient and allocate nothing.
    fused_wgrad = SimpleNamespace(wgrad_gemm_accum_fp32=make_no_op(), wgrad_gemm_accum_fp16=make_no_op())
    replacements: list[Replacement] = [
        (torch.cuda, "manual_seed", make_no_op()),
        # get_megatron_optimizer compares its parameter groups over ranks (optimizer/__init__.py). It pickles
        # them into a tensor, which would have no values here.
        (torch.distributed, "all_gather_object", copy_object),
        # CUDA's kernel unscales in place, the CPU's makes copies.
        (torch, "_amp_foreach_non_finite_check_and_unscale_", make_no_op()),
        # This in-place operator has no fake kernel. FakeTensorMode's fallback would run it on real tensors of
        # the same sizes, gibibytes of them, and never free them.
        (torch, "_fused_sgd_", make_no_op()),
        # Coalesced collectives have no fake version, single ones have.
        (param_and_grad_buffer, "_coalescing_manager", skip_coalescing),
        (random, "_get_cuda_rng_state", make_no_op()),
        (random, "_set_cuda_rng_state", make_no_op()),
        (random.CudaRNGStatesTracker, "fork", lambda self, name="": contextlib.nullcontext()),
        # As if Apex and Transformer Engine were installed.
        (layers, "fused_weight_gradient_mlp_cuda", fused_wgrad),
        (layers, "_grad_accum_fusion_available", True),
        (layers, "get_dummy_wgrad", get_dummy_gradient),
        (layers, "HAVE_TE", True),
        # Multi-tensor kernels of Apex or Transformer Engine; megatron-core's own CPU loops make temporaries.
        (optimizer, "multi_tensor_scale_impl", _copy_lists),
        (clip_grads, "l2_norm_impl", lambda *args: (torch.zeros(1), None)),
        (clip_grads, "multi_tensor_scale_impl", make_no_op()),
    ]
    # Fused, as Apex's and Transformer Engine's optimizers are: no temporaries in addition to the state.
    replacements.append((optimizers, "SGD", _make_fused(optimizers.SGD)))
    for name in ("Adam", "AdamW"):
        replacements.append((torch.optim, name, _make_fused(getattr(torch.optim, name))))
    return replacements


def _copy_lists(chunk: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], scale: float) -> None:
    """Copy each tensor of the first list to the one in the second, as the fused kernel does."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source)


def _make_fused(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a subclass of the optimizer that sets ``fused=True``."""

    class Fused(optimizer_class):  # type: ignore[misc,valid-type,unused-ignore]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "fused": True})

    return Fused
