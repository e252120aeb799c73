"""Bytes held by this rank: its tensors' storages, the device allocator's and the process's memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from shardscope.training.optimizers.gradients import local_shard

if TYPE_CHECKING:
    import psutil


def count_tensor_bytes(tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> int:
    """Return the bytes of this rank's storages of ``tensors``, each storage once (tied weights share one).

    With ``device``, only those in its memory: offloaded state of a GPU's rank is in the host's.
    """
    storages = {}
    for tensor in tensors:
        storage = local_shard(tensor).untyped_storage()
        if device is not None and storage.device.type != device.type:
            continue
        # An emptied storage has no address.
        storages[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(storages.values())


def count_parameter_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of parameters held between steps (buffers excluded)."""
    return count_tensor_bytes(model.parameters())


def count_gradient_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all ``.grad`` held at present."""
    return count_tensor_bytes(p.grad for p in model.parameters() if p.grad is not None)


def count_optimizer_bytes(optimizer: torch.optim.Optimizer, device: torch.device | None = None) -> int:
    """Return the bytes of the optimizer state per weight: moments and main weights; all, or of ``device``.

    Step counters, one scalar per tensor, are excluded: no formula covers them, and whether they are on the
    host or on the device depends on the kernel.
    """
    states = (value for state in optimizer.state.values() for name, value in state.items() if name != "step")
    return count_tensor_bytes((value for value in states if isinstance(value, torch.Tensor)), device)


def list_optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of the optimizer state, step counters included."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def read_device_bytes(device: torch.device) -> dict[str, int]:
    """Return the caching allocator's bytes on CUDA, or this process's resident memory on CPU."""
    if device.type == "cuda":
        # One call: memory_allocated() and similar functions each flatten all of the allocator's counters.
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return {
            "allocated": int(allocated["current"]),
            "max_allocated": max(_before_reset.get(device, 0), int(allocated["peak"])),
            "reserved": int(reserved["current"]),
        }
    return {"rss": int(_open_process(os.getpid()).memory_info().rss)}


_before_reset: dict[torch.device, int] = {}


def read_peak_allocated(device: torch.device) -> int:
    """Return the caching allocator's peak bytes since the start, resets included; 0 on CPU."""
    if device.type != "cuda":
        return 0
    return max(_before_reset.get(device, 0), int(torch.cuda.max_memory_allocated(device)))


def reset_peak(device: torch.device) -> None:
    """Reset the allocator's peak, keeping the previous one for :func:`read_peak_allocated`."""
    if device.type == "cuda":
        _before_reset[device] = read_peak_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)


@lru_cache(maxsize=1)
def _open_process(pid: int) -> psutil.Process:
    """Return this process, cached by id, which a fork changes: creating it reads several files of /proc."""
    import psutil

    return psutil.Process(pid)
