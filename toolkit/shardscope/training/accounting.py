"""Bytes that this rank really holds, by walking its tensors, and what the device and the system say."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardscope.training.gradients import local


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages under ``tensors`` on this rank, each storage once (tied weights share one)."""
    storages = {}
    for tensor in tensors:
        storage = local(tensor.detach()).untyped_storage()
        storages[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(storages.values())


def module_bytes(model: torch.nn.Module) -> int:
    """Bytes of parameters held between steps (buffers excluded)."""
    return tensor_bytes(model.parameters())


def gradient_bytes(model: torch.nn.Module) -> int:
    """Bytes of ``.grad`` held now."""
    return tensor_bytes(p.grad for p in model.parameters() if p.grad is not None)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state tensors (its moments; step counters are a few bytes each)."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return tensor_bytes(value for value in values if isinstance(value, torch.Tensor))


def device_bytes(device: torch.device) -> dict[str, int]:
    """What the device says: the caching allocator on CUDA, this process's resident memory on CPU."""
    if device.type == "cuda":
        return {
            "allocated": int(torch.cuda.memory_allocated(device)),
            "max_allocated": int(torch.cuda.max_memory_allocated(device)),
            "reserved": int(torch.cuda.memory_reserved(device)),
        }
    import psutil

    return {"rss": int(psutil.Process().memory_info().rss)}
