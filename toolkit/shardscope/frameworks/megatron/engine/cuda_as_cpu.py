"""Context manager that redirects Megatron-core's CUDA calls to the CPU.

Megatron-core hardcodes ``device="cuda"`` and ``torch.cuda.current_device()`` in its layers, so it cannot be
built without a GPU. ``fake_device`` runs it on fake tensors, ``cpu_ranks`` trains with it on CPU ranks; each
adds its own replacements. Training on CUDA must never use this module: it raises in a process that has
initialized CUDA, and tests check which modules import the two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
Replacement = tuple[object, str, object]
"""(module or class, attribute name, replacement)."""


class TorchFunction(Protocol):
    """A function of torch that a function mode intercepts."""

    def __call__(self, *args: object, **kwargs: object) -> object: ...


class NoOp(Protocol):
    """A function that takes any arguments and does nothing."""

    def __call__(self, *args: object, **kwargs: object) -> None: ...


class CudaMeansCpu(TorchFunctionMode):
    """Function mode that creates CPU tensors instead of CUDA tensors; ``.cuda()`` does nothing."""

    def __torch_function__(
        self,
        function: TorchFunction,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            # megatron-core's optimizers accept only torch.cuda.FloatTensor and the like, by name
            # (distrib_optimizer.py, _build_model_and_main_param_groups).
            tensor = args[0]
            assert isinstance(tensor, torch.Tensor)
            return tensor.type().replace("torch.", "torch.cuda.")
        # Factory functions take the device by keyword, ``to`` also as a positional argument.
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        if function is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        return function(*args, **kwargs)


class _Completed:
    """A completed stream or event: every method returns the object itself."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> object:
        return lambda *args, **kwargs: self


# Classes, because modules imported meanwhile evaluate ``torch.cuda.Stream | None``.
class Stream(_Completed):
    """A stream without pending work."""


class Event(_Completed):
    """An event that has completed."""


@contextlib.contextmanager
def cuda_as_cpu(
    purpose: str, mode: TorchFunctionMode, list_replacements: Callable[[], Iterable[Replacement]]
) -> Iterator[None]:
    """Redirect CUDA calls to the CPU through ``mode``, and set the attributes of ``list_replacements()``.

    Raises ``RuntimeError`` that names the ``purpose`` if this process uses CUDA.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError(f"{purpose} is for machines without GPUs: this process uses CUDA")
    with contextlib.ExitStack() as stack:
        # The own replacements last: they may replace a common one.
        for owner, name, stand_in in (*_list_common_replacements(), *list_replacements()):
            stack.enter_context(patch_attribute(owner, name, stand_in))
        stack.enter_context(mode)
        yield


def make_no_op() -> NoOp:
    """Return a new no-op function: torch.compile's table rejects one function under two names."""
    return lambda *args, **kwargs: None


def _list_common_replacements() -> list[Replacement]:
    from megatron.core.transformer.moe import moe_utils

    stream = Stream()
    return [
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", make_no_op()),
        (torch.cuda, "empty_cache", make_no_op()),
        (torch.cuda, "current_stream", lambda *args, **kwargs: stream),
        (torch.cuda, "default_stream", lambda *args, **kwargs: stream),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "Event", Event),
        (torch.cuda, "stream", lambda *args, **kwargs: contextlib.nullcontext()),
        (torch.cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        # Read even without Transformer Engine, but defined only with it (megatron-core 0.16.1).
        (moe_utils, "te_general_gemm", None),
    ]


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return bool(device.type == "cuda")
    return isinstance(device, str) and device.startswith("cuda")


@contextlib.contextmanager
def patch_attribute(owner: object, name: str, stand_in: object) -> Iterator[None]:
    """Set an attribute of a module or class inside the context, and restore it afterwards."""
    # From ``vars``: ``getattr`` would unwrap a static method, and find an inherited attribute.
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
