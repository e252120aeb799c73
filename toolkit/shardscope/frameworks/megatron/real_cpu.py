"""Megatron-core training on CPU ranks: its CUDA calls mean the CPU, inside a ``with`` and nowhere else.

Kept apart from ``cpu_stand_in``, which computes nothing: here every tensor has values, random states are real
ones and collectives travel (gloo). What megatron-core asks of CUDA beside a device (streams, events) orders
kernels that a CPU has never begun before it returns. A process that has initialised CUDA is refused, and a
test holds that the engine comes here for CPU devices only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


@contextlib.contextmanager
def cpu_ranks() -> Iterator[None]:
    """Megatron-core's CUDA calls go to the CPU inside. Raises ``RuntimeError`` where CUDA is in use."""
    if torch.cuda.is_initialized():
        raise RuntimeError("Megatron's CPU ranks are for machines without GPUs: this process uses CUDA")
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in _replacements():
            before = getattr(owner, name, None)
            setattr(owner, name, stand_in)
            stack.callback(setattr, owner, name, before)
        stack.enter_context(_CudaMeansCpu())
        yield


class _CudaMeansCpu(TorchFunctionMode):  # type: ignore[misc]
    """Factories asked for a CUDA device make CPU tensors, and ``.cuda()`` moves nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Its optimizers take torch.cuda.FloatTensor and its like only, by name.
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

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        # An event that a stream records is one more thing that has happened.
        return lambda *args, **kwargs: self


def _replacements() -> list[tuple[Any, str, Any]]:
    """(module or class, name, what stands there) of every call that would reach CUDA."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    stream = _Stream()

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def random_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_random_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    return [
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", nothing),
        (torch.cuda, "empty_cache", nothing),
        (torch.cuda, "current_stream", lambda *args, **kwargs: stream),
        (torch.cuda, "default_stream", lambda *args, **kwargs: stream),
        (torch.cuda, "Stream", lambda *args, **kwargs: stream),
        (torch.cuda, "Event", lambda *args, **kwargs: stream),
        (torch.cuda, "stream", lambda *args, **kwargs: contextlib.nullcontext()),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", random_state),
        (random, "_get_cuda_rng_state", random_state),
        (random, "_set_cuda_rng_state", set_random_state),
        # Asked for without Transformer Engine too, and there only with it (megatron-core 0.16.1).
        (moe_utils, "te_general_gemm", None),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _as_on_the_host),
        # gloo has no collectives that are launched as one.
        (param_and_grad_buffer, "_coalescing_manager", _one_by_one),
        (p2p_communication, "_p2p_ops", _held_until_sent(p2p_communication._p2p_ops)),
    ]


def _held_until_sent(send: Callable[..., Any]) -> Callable[..., Any]:
    """Schedules empty a tensor that they have sent (``deallocate_output_tensor``): CUDA's allocator waits for
    the stream that still reads it, gloo reads whatever is there by then."""

    def call(**tensors: Any) -> Any:
        aliases = {
            name: tensors[name].detach()
            for name in ("tensor_send_prev", "tensor_send_next")
            if tensors.get(name) is not None
        }
        return send(**tensors | aliases)

    return call


def _as_on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """megatron-core's ``maybe_move_tensor_to_cpu``, which leaves a tensor that is there already as it is."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _Handles:
    """Collectives that were launched one by one, waited for together."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def wait(self) -> None:
        while self.works:
            self.works.pop().wait()


@contextlib.contextmanager
def _one_by_one(group: Any = None, async_ops: bool = False, **_: Any) -> Iterator[_Handles]:
    """torch's ``_coalescing_manager``, whose asynchronous collectives are waited for by what it gives."""
    handles = _Handles()
    if not async_ops:
        yield handles
        return
    from megatron.core.distributed import param_and_grad_buffer as buffers

    def kept(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            work = collective(*args, **kwargs)
            if work is not None:
                handles.works.append(work)
            return work

        return call

    names = ("dist_reduce_scatter_func", "dist_all_gather_func")
    with contextlib.ExitStack() as stack:
        for owner, name in (*((buffers, name) for name in names), (torch.distributed, "all_reduce")):
            before = getattr(owner, name)
            setattr(owner, name, kept(before))
            stack.callback(setattr, owner, name, before)
        yield handles
