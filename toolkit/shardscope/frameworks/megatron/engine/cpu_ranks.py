"""Megatron-core training on CPU ranks, with its CUDA calls redirected to the CPU.

Unlike in ``fake_device``, which computes nothing, tensors have values, random states are real and
collectives run (gloo). CUDA streams and events become no-ops: CPU kernels finish before their call returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist

from shardscope.frameworks.megatron.engine.cuda_as_cpu import CudaMeansCpu, Replacement, cuda_as_cpu

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


@contextlib.contextmanager
def cpu_ranks() -> Iterator[None]:
    """Redirect megatron-core's CUDA calls to the CPU. Raises ``RuntimeError`` if this process uses CUDA.

    Compiled functions (``jit_fuser``) run eagerly, which saves the same tensors for backward and needs no C++
    compiler.
    """
    with (
        cuda_as_cpu("Megatron on CPU ranks", CudaMeansCpu(), _list_cpu_replacements),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def _list_cpu_replacements() -> list[Replacement]:
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    return [
        # The random tracker keeps one state for each purpose, and switches between them.
        (torch.cuda, "manual_seed", torch.manual_seed),
        (random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)),
        # Kernels that would save or compute more on a CPU than CUDA's do.
        (fused_bias_swiglu, "swiglu_back", swiglu_back),
        (torch.nn.functional, "rms_norm", rms_norm),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _keep_on_cpu),
        # gloo cannot coalesce collectives.
        (param_and_grad_buffer, "_coalescing_manager", _run_one_by_one),
        (p2p_communication, "_p2p_ops", _keep_until_sent(p2p_communication._p2p_ops)),
    ]


class _Send(Protocol[R]):
    """megatron-core's ``_p2p_ops``, which returns the handles of its messages."""

    def __call__(self, **options: object) -> R: ...


def _keep_until_sent(send: _Send[R]) -> _Send[R]:
    """Wrap ``send`` to keep each tensor's memory alive until it is sent.

    Schedules free a sent tensor (``deallocate_output_tensor``). CUDA's allocator waits for the stream that
    still reads it, but gloo would read freed memory.
    """

    def send_aliases(**options: object) -> R:
        aliases = {
            name: tensor.detach()
            for name, tensor in options.items()
            if name in ("tensor_send_prev", "tensor_send_next") and isinstance(tensor, torch.Tensor)
        }
        return send(**options | aliases)

    return send_aliases


def _keep_on_cpu(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Replace megatron-core's ``maybe_move_tensor_to_cpu`` for tensors that are already on the CPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _Handles:
    """Handles of collectives that were launched one by one and are awaited together."""

    def __init__(self) -> None:
        self.works: list[dist.Work] = []

    def wait(self) -> None:
        while self.works:
            self.works.pop().wait()


@contextlib.contextmanager
def _run_one_by_one(
    group: dist.ProcessGroup | None = None, async_ops: bool = False, **_: object
) -> Iterator[_Handles]:
    """Replace torch's ``_coalescing_manager``; the yielded handle waits for all asynchronous collectives."""
    handles = _Handles()
    # Synchronous collectives have completed when they return: nothing to wait for.
    if not async_ops:
        yield handles
        return
    from megatron.core.distributed import param_and_grad_buffer as buffers

    def record_work(collective: Callable[P, dist.Work | None]) -> Callable[P, dist.Work | None]:
        def call(*args: P.args, **kwargs: P.kwargs) -> dist.Work | None:
            work = collective(*args, **kwargs)
            if work is not None:
                handles.works.append(work)
            return work

        return call

    # The collectives that megatron-core's buffers run in this context (param_and_grad_buffer.py).
    names = ("dist_reduce_scatter_func", "dist_all_gather_func")
    with contextlib.ExitStack() as stack:
        for owner, name in (*((buffers, name) for name in names), (torch.distributed, "all_reduce")):
            before = getattr(owner, name)
            setattr(owner, name, record_work(before))
            stack.callback(setattr, owner, name, before)
        yield handles


# ---- CPU versions of fused CUDA kernels, which save the same tensors for backward
#
# A rehearsal on CPU ranks must hold the same tensors as the run on GPUs.


def swiglu_back(gradient: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    """Compute megatron-core's ``swiglu_back`` with torch's SiLU backward: half the passes over memory."""
    gate, up = both.chunk(2, -1)
    gate_gradient = torch.ops.aten.silu_backward(gradient * up, gate)
    return torch.cat((gate_gradient, gradient * torch.nn.functional.silu(gate)), -1)


def rms_norm(
    hidden: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Compute ``rms_norm`` over the last dimension; torch's own saves its output twice on a CPU."""
    if weight is None or eps is None or len(normalized_shape) != 1:
        raise ValueError(f"Megatron-core has no norm over {tuple(normalized_shape)} without weight or eps")
    return _RmsNorm.apply(hidden, weight, eps)


class _Context(Protocol):
    """The part of autograd's context that :class:`_RmsNorm` uses."""

    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


class _RmsNorm(torch.autograd.Function):
    """RMSNorm that saves its input and one element per row (Zhang & Sennrich 2019, section 3)."""

    apply: ClassVar[Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]]
    """Type of torch's own classmethod, which has none."""

    @staticmethod
    def forward(ctx: _Context, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        # In fp32 and in place where possible: each pass over memory counts on a CPU.
        wide = hidden.float()
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        return (wide * scale).mul_(weight).to(hidden.dtype)

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, weight, scale = ctx.saved_tensors
        normed = hidden.float() * scale
        weighted = gradient * weight
        weight_gradient = (gradient * normed).flatten(0, -2).sum(0)
        # d(x·s)/dx with s = rsqrt(mean(x²)): the part of the gradient along the normed input drops out.
        along = (weighted * normed).mean(-1, keepdim=True)
        hidden_gradient = (weighted - normed * along).mul_(scale)
        return hidden_gradient.to(hidden.dtype), weight_gradient.to(weight.dtype), None
