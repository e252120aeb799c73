"""Megatron-core on CPU tensors: its CUDA calls answered by the CPU, inside a ``with`` and nowhere else.

Megatron-core writes ``device="cuda"`` and ``torch.cuda.current_device()`` into its layers, so it cannot
even be built without a GPU. A rehearsal moves no data: here those calls mean the CPU. Nothing that trains on
CUDA may come through here, so a process that has initialised CUDA is refused, and a test holds who imports
this file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


@contextlib.contextmanager
def cpu_stand_in() -> Iterator[None]:
    """Megatron-core's CUDA calls go to the CPU inside. Raises ``RuntimeError`` where CUDA is in use."""
    if torch.cuda.is_initialized():
        raise RuntimeError("Megatron's CPU stand-in is for rehearsals: this process uses CUDA")
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in _replacements():
            stack.enter_context(_replaced(owner, name, stand_in))
        stack.enter_context(_CudaMeansCpu())
        yield


class _CudaMeansCpu(TorchFunctionMode):  # type: ignore[misc]
    """Factories asked for a CUDA device make CPU tensors, and ``.cuda()`` moves nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.item:
            # A fake tensor has no value. Megatron asks for norms and infinities, of which there are none, and
            # for the number of a mask, of which there is a first.
            return 0.0 if args[0].is_floating_point() else 1
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The distributed optimizer takes torch.cuda.BFloat16Tensor and its like only.
            return function(*args).replace("torch.", "torch.cuda.")
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": _CPU}
        if function is torch.Tensor.to:
            args = tuple(_CPU if _is_cuda(arg) else arg for arg in args)
        return function(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return bool(device.type == "cuda")
    return isinstance(device, str) and device.startswith("cuda")


class _Stream:
    """A stream on which everything has always happened."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _replacements() -> list[tuple[Any, str, Any]]:
    """(module or class, name, what stands there) of every call that would reach CUDA."""
    from megatron.core import optimizer as optimizers
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer.moe import moe_utils

    stream = _Stream()
    dummies: dict[Any, torch.Tensor] = {}

    def dummy_gradient(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
        """Transformer Engine's own way (module/base.py, get_dummy_wgrad): one for each shape, kept."""
        key = (tuple(shape), dtype)
        if key not in dummies:
            dummies[key] = torch.empty(shape, dtype=dtype)
        return dummies[key].detach()

    def nothing() -> Callable[..., None]:
        # Another each time: torch's compiler keeps a table of functions, and refuses one under two names.
        return lambda *args, **kwargs: None

    def as_everywhere(found: list[Any], mine: Any, group: Any = None) -> None:
        found[:] = [mine] * len(found)

    def together(*args: Any, **kwargs: Any) -> contextlib.nullcontext[_Stream]:
        return contextlib.nullcontext(stream)

    # The weight-gradient kernels add into the main gradient and allocate nothing.
    fused_wgrad = SimpleNamespace(wgrad_gemm_accum_fp32=nothing(), wgrad_gemm_accum_fp16=nothing())
    found = [
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", nothing()),
        (torch.cuda, "current_stream", lambda *args, **kwargs: stream),
        (torch.cuda, "default_stream", lambda *args, **kwargs: stream),
        (torch.cuda, "Stream", lambda *args, **kwargs: stream),
        (torch.cuda, "Event", lambda *args, **kwargs: stream),
        (torch.cuda, "stream", lambda *args, **kwargs: contextlib.nullcontext()),
        (torch.cuda, "manual_seed", nothing()),
        (torch.cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (torch.distributed, "all_gather_object", as_everywhere),
        # CUDA's kernel unscales in place, a CPU's by way of copies.
        (torch, "_amp_foreach_non_finite_check_and_unscale_", nothing()),
        # It changes tensors in place and has no fake counterpart: on fake tensors torch would run it on real
        # ones of the same sizes, gibibytes of them, and give none of that back (FakeTensorMode's fallback).
        (torch, "_fused_sgd_", nothing()),
        # Several collectives launched as one have no fake counterpart; one by one they have.
        (param_and_grad_buffer, "_coalescing_manager", together),
        (random, "_get_cuda_rng_state", nothing()),
        (random, "_set_cuda_rng_state", nothing()),
        (random.CudaRNGStatesTracker, "fork", lambda self, name="": contextlib.nullcontext()),
        (layers, "fused_weight_gradient_mlp_cuda", fused_wgrad),
        (layers, "_grad_accum_fusion_available", True),
        (layers, "get_dummy_wgrad", dummy_gradient),
        (layers, "HAVE_TE", True),
        # Asked for without Transformer Engine too, and there only with it (megatron-core 0.16.1).
        (moe_utils, "te_general_gemm", None),
        (optimizer, "multi_tensor_scale_impl", _copy_lists),
        (clip_grads, "l2_norm_impl", lambda *args: (torch.zeros(1), None)),
        (clip_grads, "multi_tensor_scale_impl", nothing()),
    ]
    # One kernel, as Apex's and Transformer Engine's optimizers are: no temporaries beside their state.
    found.append((optimizers, "SGD", _fused(optimizers.SGD)))
    for name in ("Adam", "AdamW"):
        found.append((torch.optim, name, _fused(getattr(torch.optim, name))))
    return found


def _copy_lists(chunk: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], scale: float) -> None:
    """One kernel that copies each tensor of the first list to its place in the second."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source)


def _fused(kind: Any) -> Any:
    """The optimizer class, told to step in one kernel."""

    class Fused(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "fused": True})

    return Fused


@contextlib.contextmanager
def _replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
