"""Megatron-core training on CPU ranks: its CUDA calls mean the CPU, inside a ``with`` and nowhere else.

Unlike in ``cpu_stand_in``, which computes nothing, every tensor has values, random states are real ones and
collectives travel (gloo). What megatron-core asks of CUDA beside a device (streams, events) orders kernels
that a CPU has never begun before it returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardscope.frameworks.megatron.engine import cpu_kernels
from shardscope.frameworks.megatron.engine.cuda_as_cpu import CudaMeansCpu, Replacement, cuda_as_cpu


@contextlib.contextmanager
def cpu_ranks() -> Iterator[None]:
    """Megatron-core's CUDA calls go to the CPU inside. Raises ``RuntimeError`` where CUDA is in use.

    What it has torch compile (``jit_fuser``) runs operator by operator: with the same tensors kept for
    backward, and without a C++ compiler.
    """
    with (
        cuda_as_cpu("Megatron on CPU ranks", CudaMeansCpu(), _replacements),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def _replacements() -> list[Replacement]:
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    return [
        (torch.cuda, "manual_seed", torch.manual_seed),
        (random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)),
        (fused_bias_swiglu, "swiglu_back", cpu_kernels.swiglu_back),
        (torch.nn.functional, "rms_norm", cpu_kernels.rms_norm),
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
