"""CUDA's calls meaning the CPU, inside a ``with`` and nowhere else: what Megatron-core's two stand-ins share.

Megatron-core writes ``device="cuda"`` and ``torch.cuda.current_device()`` into its layers, so it cannot even
be built without a GPU. ``cpu_stand_in`` plays it on tensors without values, ``real_cpu`` trains with it on
CPU ranks; each brings what it replaces beside this. Nothing that trains on CUDA may come through here, so a
process that has initialised CUDA is refused, and tests hold who imports the two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
Replacement = tuple[Any, str, Any]
"""(module or class, name, what stands there)."""


class CudaMeansCpu(TorchFunctionMode):  # type: ignore[misc]
    """Factories asked for a CUDA device make CPU tensors, and ``.cuda()`` moves nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Its optimizers take torch.cuda.FloatTensor and its like only, by name.
            return function(*args).replace("torch.", "torch.cuda.")
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        if function is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        return function(*args, **kwargs)


class _AlreadyHappened:
    """Every call on it gives itself: an event that a stream records is one more thing that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self


# Classes, for ``torch.cuda.Stream | None`` in a module that is imported meanwhile.
class Stream(_AlreadyHappened):
    """A stream on which everything has always happened."""


class Event(_AlreadyHappened):
    """Recorded and waited for long since."""


@contextlib.contextmanager
def cuda_as_cpu(
    what: str, mode: TorchFunctionMode, replacements: Callable[[], Iterable[Replacement]]
) -> Iterator[None]:
    """CUDA's calls go to the CPU inside, by way of ``mode``, and ``replacements()`` stand in their places.

    Raises ``RuntimeError`` naming ``what`` this is where CUDA is in use.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError(f"{what} is for machines without GPUs: this process uses CUDA")
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in (*_in_any_case(), *replacements()):
            stack.enter_context(_replaced(owner, name, stand_in))
        stack.enter_context(mode)
        yield


def nothing() -> Callable[..., None]:
    """Another function each time: torch's compiler keeps a table of them, and refuses one under two names."""
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
        # Asked for without Transformer Engine too, and there only with it (megatron-core 0.16.1).
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
