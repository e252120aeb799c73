"""Megatron-core training on CPU ranks, with its CUDA calls redirected to the CPU.

Unlike in ``cpu_stand_in``, which computes nothing, tensors have values, random states are real and
collectives run (gloo). CUDA streams and events become no-ops: CPU kernels finish before their call returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardscope.frameworks.megatron.engine.cuda_as_cpu import CudaMeansCpu, Replacement, cuda_as_cpu


@contextlib.contextmanager
def cpu_ranks() -> Iterator[None]:
    """Redirect megatron-core's CUDA calls to the CPU. Raises ``RuntimeError`` if this process uses CUDA.

    Compiled functions (``jit_fuser``) run eagerly, which saves the same tensors for backward and needs no C++
    compiler.
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
        (fused_bias_swiglu, "swiglu_back", swiglu_back),
        (torch.nn.functional, "rms_norm", rms_norm),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _as_on_the_host),
        # gloo cannot coalesce collectives.
        (param_and_grad_buffer, "_coalescing_manager", _one_by_one),
        (p2p_communication, "_p2p_ops", _held_until_sent(p2p_communication._p2p_ops)),
    ]


def _held_until_sent(send: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``send`` to keep each tensor's memory alive until it is sent.

    Schedules free a sent tensor (``deallocate_output_tensor``). CUDA's allocator waits for the stream that
    still reads it, but gloo would read freed memory.
    """

    def call(**tensors: Any) -> Any:
        aliases = {
            name: tensors[name].detach()
            for name in ("tensor_send_prev", "tensor_send_next")
            if tensors.get(name) is not None
        }
        return send(**tensors | aliases)

    return call


def _as_on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replace megatron-core's ``maybe_move_tensor_to_cpu`` for tensors that are already on the CPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _Handles:
    """Handles of collectives that were launched one by one and are awaited together."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def wait(self) -> None:
        while self.works:
            self.works.pop().wait()


@contextlib.contextmanager
def _one_by_one(group: Any = None, async_ops: bool = False, **_: Any) -> Iterator[_Handles]:
    """Replace torch's ``_coalescing_manager``; the yielded handle waits for all asynchronous collectives."""
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


# ---- CPU versions of fused CUDA kernels, which save the same tensors for backward
#
# A rehearsal on CPU ranks must hold the same tensors as the run on GPUs.


def swiglu_back(gradient: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    """Compute megatron-core's ``swiglu_back`` with torch's SiLU backward: half the passes over memory."""
    gate, up = both.chunk(2, -1)
    of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
    return torch.cat((of_gate, gradient * torch.nn.functional.silu(gate)), -1)


def rms_norm(
    hidden: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Compute ``rms_norm`` over the last dimension; torch's own saves its output twice on a CPU."""
    if weight is None or eps is None or len(normalized_shape) != 1:
        raise ValueError(f"a norm over {tuple(normalized_shape)} without weight or eps is none of Megatron's")
    normed: torch.Tensor = _RmsNorm.apply(hidden, weight, eps)
    return normed


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    """RMSNorm that saves its input and one element per row (Zhang & Sennrich 2019, section 3)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = hidden.float()
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        return (wide * scale).mul_(weight).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, weight, scale = ctx.saved_tensors
        normed = hidden.float() * scale
        weighted = gradient * weight
        of_weight = (gradient * normed).flatten(0, -2).sum(0)
        along = (weighted * normed).mean(-1, keepdim=True)
        of_hidden = (weighted - normed * along).mul_(scale)
        return of_hidden.to(hidden.dtype), of_weight.to(weight.dtype), None
