"""What libraries and the allocator take beside tensors: known only as a band, so said as one."""

from __future__ import annotations

from typing import NamedTuple

MIB = 2**20

COMMUNICATOR_OF_TWO = 544 * MIB
COMMUNICATOR_OF_MORE = 688 * MIB
"""A NCCL communicator's buffers on NVLink: measured on 4 x A100, NVIDIA/nccl#964."""

CUDA_CONTEXT = 512 * MIB
"""CUDA context with lazily loaded kernels and the cuBLAS workspace: 300 to 700 MiB are reported
(pytorch/pytorch#107667, #28113); the point is their middle."""

CPU_RANK = 450 * MIB
"""Resident Python, torch and transformers of one CPU rank, measured by our own runs on Linux."""

FRAGMENTATION_PERCENT = 3
"""Share of what a step allocates and frees that the caching allocator cannot hand out again (an assumption:
blocks round up to 2 MiB; published reserved/allocated pairs range from 0 to over 30 %)."""

FRAGMENTATION_HIGH_PERCENT = 12


class Band(NamedTuple):
    """The point that predictions use, and the least and the most that was seen."""

    low: int
    point: int
    high: int


def communication(group_sizes: tuple[int, ...], on_gpu: bool) -> Band:
    """Buffers of one communicator for each group of more than one rank."""
    if not on_gpu:
        return Band(0, 0, 0)
    point = sum(
        COMMUNICATOR_OF_TWO if size == 2 else COMMUNICATOR_OF_MORE for size in group_sizes if size > 1
    )
    # Buffers scale with NCCL's channels: fewer over PCIe, more once all-to-all opens them (nccl#1685).
    return Band(point // 4, point, 2 * point)


def runtime(on_gpu: bool) -> Band:
    """What one rank takes before it makes its first tensor."""
    if not on_gpu:
        return Band(CPU_RANK * 3 // 4, CPU_RANK, CPU_RANK * 3 // 2)
    return Band(300 * MIB, CUDA_CONTEXT, 700 * MIB)


def fragmentation(allocated_and_freed: int, on_gpu: bool) -> Band:
    """What the caching allocator cannot reuse of the given bytes."""
    if not on_gpu:
        return Band(0, 0, 0)
    return Band(
        0,
        allocated_and_freed * FRAGMENTATION_PERCENT // 100,
        allocated_and_freed * FRAGMENTATION_HIGH_PERCENT // 100,
    )
