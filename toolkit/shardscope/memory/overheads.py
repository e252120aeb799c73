"""What libraries and the allocator take beside tensors: known only as a band, so said as one."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

MIB = 2**20

COMMUNICATOR_OF_TWO = 544 * MIB
COMMUNICATOR_OF_MORE = 688 * MIB
"""A NCCL communicator's buffers on NVLink: measured on 4 x A100, NVIDIA/nccl#964."""

COMMUNICATOR_AT_MOST = 1_600_000_000
"""One communicator after its first all-reduce, about 6 GB for three or more: NVIDIA/nccl#864. Megatron on
8 x H100 with experts had 7 to 10 GB in all: verl-project/verl#6266."""

CUDA_CONTEXT = 512 * MIB
CUDA_CONTEXT_AT_LEAST = 287_047_680
CUDA_CONTEXT_AT_MOST = 1_057_161_216
"""CUDA context with lazily loaded kernels: 287 MB (pytorch/pytorch#86509) to 426 MiB
(unslothai/unsloth-zoo#1053), to which a run's kernels and cuBLAS's workspaces come (8 MiB, 32 MiB on Hopper;
aten/src/ATen/cuda/CublasHandlePool.cpp). Before CUDA 11.7 all kernels were loaded at once: 1,008 MiB
(pytorch/pytorch#28394, #107667)."""

CPU_RANK = 450 * MIB
"""Resident Python, torch and transformers of one CPU rank, measured by our own runs on Linux."""

FRAGMENTATION_PERCENT = 3
"""Share of what a step allocates and frees that the caching allocator cannot hand out again (an assumption:
blocks round up to 2 MiB; published reserved/allocated pairs range from 0 to over 30 %)."""

FRAGMENTATION_HIGH_PERCENT = 25
"""Three quarters of BLOOM's fp16 calibration rows (nvidia-smi) lie below it. Of 454 runs none whose estimate
was under 80 % of the card ran out of memory (Fujii et al. 2024, arXiv:2411.06465)."""


class Band(NamedTuple):
    """The point that predictions use, and the least and the most that was seen."""

    low: int
    point: int
    high: int


@lru_cache(maxsize=4096)
def communication(group_sizes: tuple[int, ...], on_gpu: bool) -> Band:
    """Buffers of one communicator for each group of more than one rank."""
    if not on_gpu:
        return Band(0, 0, 0)
    sizes = [size for size in group_sizes if size > 1]
    if has_world_group(group_sizes):
        sizes.append(max(sizes) + 1)
    point = sum(COMMUNICATOR_OF_TWO if size == 2 else COMMUNICATOR_OF_MORE for size in sizes)
    # Buffers scale with NCCL's channels: fewer over PCIe, more once all-to-all opens them (nccl#986, #1685).
    return Band(point // 4, point, COMMUNICATOR_AT_MOST * len(sizes))


def has_world_group(group_sizes: tuple[int, ...]) -> bool:
    """Whether all ranks meet in a communicator of their own: for barriers, the gradient's norm, the loss.

    Where there is one group only, it is that of all ranks itself.
    """
    return sum(size > 1 for size in group_sizes) > 1


def runtime(on_gpu: bool) -> Band:
    """What one rank takes before it makes its first tensor."""
    if not on_gpu:
        return Band(CPU_RANK * 3 // 4, CPU_RANK, CPU_RANK * 3 // 2)
    return Band(CUDA_CONTEXT_AT_LEAST, CUDA_CONTEXT, CUDA_CONTEXT_AT_MOST)


def fragmentation(allocated_and_freed: int, on_gpu: bool) -> Band:
    """What the caching allocator cannot reuse of the given bytes."""
    if not on_gpu:
        return Band(0, 0, 0)
    high = allocated_and_freed * FRAGMENTATION_HIGH_PERCENT // 100
    return Band(0, lost_to_gaps(allocated_and_freed), high)


def lost_to_gaps(allocated_and_freed: int) -> int:
    """The point of :func:`fragmentation` on a GPU, without its band."""
    return allocated_and_freed * FRAGMENTATION_PERCENT // 100
