"""Bytes that this rank really holds, by walking its tensors, and what the device and the system say."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from shardscope.training.optimizers.gradients import local


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages under ``tensors`` on this rank, each storage once (tied weights share one)."""
    storages = {}
    for tensor in tensors:
        storage = local(tensor).untyped_storage()
        storages[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(storages.values())


def module_bytes(model: torch.nn.Module) -> int:
    """Bytes of parameters held between steps (buffers excluded)."""
    return tensor_bytes(model.parameters())


def gradient_bytes(model: torch.nn.Module) -> int:
    """Bytes of ``.grad`` held now."""
    return tensor_bytes(p.grad for p in model.parameters() if p.grad is not None)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state of weights: moments and main copies.

    Step counters, one number for a tensor however large, are left out: no formula is about them, and where
    they lie (host or device) hangs on the kernel.
    """
    states = (value for state in optimizer.state.values() for name, value in state.items() if name != "step")
    return tensor_bytes(value for value in states if isinstance(value, torch.Tensor))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors of the optimizer's state, step counters among them."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def device_bytes(device: torch.device) -> dict[str, int]:
    """What the device says: the caching allocator on CUDA, this process's resident memory on CPU."""
    if device.type == "cuda":
        # memory_allocated() and its like each flatten all of the allocator's hundred counters.
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return {
            "allocated": int(allocated["current"]),
            "max_allocated": max(_before_reset.get(device, 0), int(allocated["peak"])),
            "reserved": int(reserved["current"]),
        }
    return {"rss": int(_process(os.getpid()).memory_info().rss)}


_before_reset: dict[torch.device, int] = {}


def peak_allocated(device: torch.device) -> int:
    """Most bytes that the caching allocator has had in use, whatever was reset since; 0 on CPU."""
    if device.type != "cuda":
        return 0
    return max(_before_reset.get(device, 0), int(torch.cuda.max_memory_allocated(device)))


def reset_peak(device: torch.device) -> None:
    """Start the allocator's peak anew, remembering the one before for :func:`peak_allocated`."""
    if device.type == "cuda":
        _before_reset[device] = peak_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)


@lru_cache(maxsize=1)
def _process(pid: int) -> Any:
    """This process by its id, which a fork changes; making one reads several files of /proc."""
    import psutil

    return psutil.Process(pid)
