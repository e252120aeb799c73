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

RCCL_FIRST = 2**30
RCCL_MORE = 665 * MIB
"""RCCL's communicators, the first and each further one of a rank: LUMI-AI-Guide#111, on MI250X."""

CONTEXT = 480 * MIB
CONTEXT_AT_LEAST = 256 * MIB
CONTEXT_AT_MOST = 1_057_161_216
"""A context with the kernels that a run has loaded. Alone 256 MiB on an RTX 3090 (invoke-ai/InvokeAI#9413),
287 MB (pytorch/pytorch#86509), 426 MiB on an RTX 6000 Ada (unslothai/unsloth-zoo#1053), to which kernels come
as they are used. Before CUDA 11.7 all were loaded at once: 1,008 MiB on a Titan V (pytorch/pytorch#28394)."""

WORKSPACE = 8_519_680
WORKSPACES = {
    "hopper": 32 * MIB,
    "cdna2": (32 + 76) * MIB,
    "cdna3": (128 + 76) * MIB,
    "cdna4": (128 + 76) * MIB,
}
"""cuBLAS's workspace, and those of hipBLAS and hipBLASLt, which a first product allocates
(aten/src/ATen/cuda/CublasHandlePool.cpp: ``parseChosenWorkspaceSize``, ``parseCUDABlasLtWorkspaceSize``)."""

CPU_RANK = 450 * MIB
"""Resident Python, torch and transformers of one CPU rank, measured by our own runs on Linux."""

FRAGMENTATION_PERCENT = 3
"""Share of what a step allocates and frees that the caching allocator cannot hand out again (an assumption:
blocks round up to 2 MiB; published reserved/allocated pairs range from 0 to over 30 %)."""

FRAGMENTATION_HIGH_PERCENT = 48
"""The most that the allocator holds beyond tensors, as a share of what a step allocates and frees
(:func:`shardscope.memory.overheads.band.allocated_and_freed`).

Chosen by a rule from published rows of role ``calibration`` whose figure is ``reserved`` or nvidia-smi's
(107 rows of 4 sources in tests/measured): nine tenths of them lie below it, each source counting alike, with
what ran beside the plan described and contexts and communicators at their most. tests/accuracy/gaps.py is
the rule; rows of role ``judge`` had no part in it."""

TIGHT_PERCENT = 80
"""Of 454 runs none whose estimate was below this share of the available memory ran out of it (Fujii et al.
2024, arXiv:2411.06465)."""


class Band(NamedTuple):
    """The point that predictions use, and the least and the most that was seen."""

    low: int
    point: int
    high: int


@lru_cache(maxsize=4096)
def communication(group_sizes: tuple[int, ...], vendor: str) -> Band:
    """Buffers of one communicator for each group of more than one rank; ``vendor`` is :attr:`Gpu.vendor`."""
    if vendor == "cpu":
        return Band(0, 0, 0)
    sizes = [size for size in group_sizes if size > 1]
    if has_world_group(group_sizes):
        sizes.append(max(sizes) + 1)
    point = sum(COMMUNICATOR_OF_TWO if size == 2 else COMMUNICATOR_OF_MORE for size in sizes)
    if vendor == "amd" and sizes:
        point = RCCL_FIRST + RCCL_MORE * (len(sizes) - 1)
    # Buffers scale with NCCL's channels: fewer over PCIe, more once all-to-all opens them (nccl#986, #1685).
    return Band(point // 4, point, COMMUNICATOR_AT_MOST * len(sizes))


def has_world_group(group_sizes: tuple[int, ...]) -> bool:
    """Whether all ranks meet in a communicator of their own: for barriers, the gradient's norm, the loss.

    Where there is one group only, it is that of all ranks itself.
    """
    return sum(size > 1 for size in group_sizes) > 1


@lru_cache(maxsize=256)
def runtime(vendor: str, generation: str | None) -> Band:
    """What one rank takes before its first tensor: :attr:`Gpu.vendor` and :attr:`Gpu.architecture`."""
    if vendor == "cpu":
        return Band(CPU_RANK * 3 // 4, CPU_RANK, CPU_RANK * 3 // 2)
    space = WORKSPACES.get(generation or "", WORKSPACE)
    return Band(CONTEXT_AT_LEAST + space, CONTEXT + space, CONTEXT_AT_MOST + space)


def fragmentation(allocated_and_freed: int, on_gpu: bool) -> Band:
    """What the caching allocator cannot reuse of the given bytes."""
    if not on_gpu:
        return Band(0, 0, 0)
    high = allocated_and_freed * FRAGMENTATION_HIGH_PERCENT // 100
    return Band(0, lost_to_gaps(allocated_and_freed), high)


def on_the_card(high: int, peak: int, usable: int, on_gpu: bool) -> int:
    """The band's top, ``high``, as a card can show it: no more than is usable while the ``peak`` itself fits.

    Before the caching allocator fails, it gives back every block that it holds whole and tries again
    (c10/cuda/CUDACachingAllocator.cpp: "If the cudaMalloc fails, the allocator will free all cached blocks
    that are not split and retry the allocation"; ``release_cached_blocks``). A host has no such reserve.
    """
    return max(peak, min(high, usable)) if on_gpu and peak <= usable else high


def lost_to_gaps(allocated_and_freed: int) -> int:
    """The point of :func:`fragmentation` on a GPU, without its band."""
    return allocated_and_freed * FRAGMENTATION_PERCENT // 100
