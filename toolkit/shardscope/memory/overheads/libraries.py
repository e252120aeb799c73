"""Memory of libraries and of the allocator beyond tensors, as bands: exact values are unknown."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

MIB = 2**20

COMMUNICATOR_OF_TWO = 544 * MIB
COMMUNICATOR_OF_MORE = 688 * MIB
"""Buffers of a NCCL communicator on NVLink: measured on 4 x A100, NVIDIA/nccl#964."""

COMMUNICATOR_AT_MOST = 1_600_000_000
"""One communicator after its first all-reduce; about 6 GB for three or more (NVIDIA/nccl#864). Megatron on 8
x H100 with experts had 7 to 10 GB in total (verl-project/verl#6266)."""

RCCL_FIRST = 2**30
RCCL_MORE = 665 * MIB
"""A rank's first RCCL communicator and each further one, on MI250X: LUMI-AI-Guide#111."""

CONTEXT = 480 * MIB
CONTEXT_AT_LEAST = 256 * MIB
CONTEXT_AT_MOST = 1_057_161_216
"""A CUDA context with a run's loaded kernels. Empty: 256 MiB on an RTX 3090 (invoke-ai/InvokeAI#9413), 287 MB
(pytorch/pytorch#86509), 426 MiB on an RTX 6000 Ada (unslothai/unsloth-zoo#1053); kernels are loaded on first
use. Before CUDA 11.7, all were loaded at once: 1,008 MiB on a Titan V (pytorch/pytorch#28394)."""

WORKSPACE = 8_519_680
WORKSPACES = {
    "hopper": 32 * MIB,
    "cdna2": (32 + 76) * MIB,
    "cdna3": (128 + 76) * MIB,
    "cdna4": (128 + 76) * MIB,
}
"""Workspaces of cuBLAS, or of hipBLAS and hipBLASLt, allocated at the first matmul
(aten/src/ATen/cuda/CublasHandlePool.cpp: ``parseChosenWorkspaceSize``, ``parseCUDABlasLtWorkspaceSize``)."""

CPU_RANK = 450 * MIB
"""Resident Python, torch and transformers of one CPU rank, measured by our own runs on Linux."""

FRAGMENTATION_PERCENT = 3
"""Share of a step's allocated and freed bytes that the caching allocator cannot reuse (an assumption: blocks
round up to 2 MiB; published reserved/allocated pairs range from 0 to over 30 %)."""

FRAGMENTATION_HIGH_PERCENT = 48
"""Maximum of the allocator's memory beyond tensors, as a share of a step's allocated and freed bytes
(:func:`shardscope.memory.overheads.band.compute_allocated_and_freed`).

Chosen by a rule from published rows of role ``calibration`` with ``reserved`` or nvidia-smi figures (107 rows
of 4 sources in tests/measured): 90 % of them are below it, with equal weight per source, other memory of the
described setup included, and contexts and communicators at their maximum.
tests/accuracy/memory_band.py implements the rule; rows of role ``judge`` are not used."""

TIGHT_PERCENT = 80
"""In 454 runs, none with an estimate below this share of the available memory ran out of memory (Fujii et al.
2024, arXiv:2411.06465)."""


class Band(NamedTuple):
    """Point estimate, with the observed minimum and maximum, in bytes."""

    low: int
    point: int
    high: int


@lru_cache(maxsize=4096)
def estimate_communication(group_sizes: tuple[int, ...], vendor: str) -> Band:
    """Return the buffers of one communicator per group of two or more ranks.

    ``vendor`` is :attr:`Gpu.vendor`.
    """
    if vendor == "cpu":
        return Band(0, 0, 0)
    # A group of one rank never creates a communicator. Only the world's existence matters, not its size: any
    # size above two counts the same.
    sizes = [size for size in group_sizes if size > 1]
    if has_world_group(group_sizes):
        sizes.append(max(sizes) + 1)
    point = sum(COMMUNICATOR_OF_TWO if size == 2 else COMMUNICATOR_OF_MORE for size in sizes)
    if vendor == "amd" and sizes:
        point = RCCL_FIRST + RCCL_MORE * (len(sizes) - 1)
    # Buffers scale with NCCL's channels: fewer over PCIe, more once all-to-all opens them (nccl#986, #1685).
    return Band(point // 4, point, COMMUNICATOR_AT_MOST * len(sizes))


def has_world_group(group_sizes: tuple[int, ...]) -> bool:
    """Return whether all ranks have a communicator of their own: for barriers, gradient norm and loss.

    A single group is that of all ranks itself.
    """
    return sum(size > 1 for size in group_sizes) > 1


@lru_cache(maxsize=256)
def estimate_runtime(vendor: str, generation: str | None) -> Band:
    """Return one rank's memory before its first tensor.

    ``vendor`` is :attr:`Gpu.vendor`, ``generation`` :attr:`Gpu.architecture`.
    """
    if vendor == "cpu":
        return Band(CPU_RANK * 3 // 4, CPU_RANK, CPU_RANK * 3 // 2)
    # The workspace's size is set in the library's source, so it has no band.
    space = WORKSPACES.get(generation or "", WORKSPACE)
    return Band(CONTEXT_AT_LEAST + space, CONTEXT + space, CONTEXT_AT_MOST + space)


def estimate_fragmentation(allocated_and_freed: int, on_gpu: bool) -> Band:
    """Return the bytes that the caching allocator cannot reuse."""
    if not on_gpu:
        return Band(0, 0, 0)
    point = allocated_and_freed * FRAGMENTATION_PERCENT // 100
    return Band(0, point, allocated_and_freed * FRAGMENTATION_HIGH_PERCENT // 100)


def limit_to_usable(high: int, peak: int, usable: int, on_gpu: bool) -> int:
    """Return the band's top as a GPU can show it: at most the usable bytes, if the ``peak`` itself fits.

    Before the caching allocator fails, it frees every unsplit cached block and retries
    (c10/cuda/CUDACachingAllocator.cpp: "If the cudaMalloc fails, the allocator will free all cached blocks
    that are not split and retry the allocation"; ``release_cached_blocks``). A host does not.
    """
    return max(peak, min(high, usable)) if on_gpu and peak <= usable else high
