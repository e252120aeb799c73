"""Context manager that redirects Megatron-core's CUDA calls to the CPU.

Megatron-core hardcodes ``device="cuda"`` and ``torch.cuda.current_device()`` in its layers, so it cannot be
built without a GPU. ``cpu_stand_in`` runs it on fake tensors, ``real_cpu`` trains with it on CPU ranks; each
adds its own replacements. Training on CUDA must never use this module: it raises in a process that has
initialized CUDA, and tests check which modules import the two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
Replacement = tuple[Any, str, Any]
"""(module or class, attribute name, replacement)."""


class CudaMeansCpu(TorchFunctionMode):  # type: ignore[misc]
    """Function mode that creates CPU tensors instead of CUDA tensors; ``.cuda()`` does nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron-core's optimizers accept only torch.cuda.FloatTensor and the like, by name.
            return function(*args).replace("torch.", "torch.cuda.")
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        if function is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        return function(*args, **kwargs)


class _AlreadyHappened:
    """A completed stream or event: every method returns the object itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self


# Classes, because modules imported meanwhile evaluate ``torch.cuda.Stream | None``.
class Stream(_AlreadyHappened):
    """A stream without pending work."""


class Event(_AlreadyHappened):
    """An event that has completed."""


@contextlib.contextmanager
def cuda_as_cpu(
    what: str, mode: TorchFunctionMode, replacements: Callable[[], Iterable[Replacement]]
) -> Iterator[None]:
    """Redirect CUDA calls to the CPU through ``mode``, and patch in ``replacements()``.

    Raises ``RuntimeError`` with the name ``what`` if this process uses CUDA.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError(f"{what} is for machines without GPUs: this process uses CUDA")
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in (*_in_any_case(), *replacements()):
            stack.enter_context(_replaced(owner, name, stand_in))
        stack.enter_context(mode)
        yield


def nothing() -> Callable[..., None]:
    """Return a new no-op function: torch.compile's table rejects one function under two names."""
    return lambda *args, **kwargs: None


def _in_any_case() -> list[Replacement]:
    from megatron.core.transformer.moe import moe_utils

    stream = Stream()
    return [
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", nothing()),
        (torch.cuda, "empty_cache", nothing()),
        (torch.cuda, "current_stream", lambda *args, **kwargs: stream),
        (torch.cuda, "default_stream", lambda *args, **kwargs: stream),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "Event", Event),
        (torch.cuda, "stream", lambda *args, **kwargs: contextlib.nullcontext()),
        (torch.cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        # Read even without Transformer Engine, but defined only with it (megatron-core 0.16.1).
        (moe_utils, "te_general_gemm", None),
    ]


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return bool(device.type == "cuda")
    return isinstance(device, str) and device.startswith("cuda")


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
