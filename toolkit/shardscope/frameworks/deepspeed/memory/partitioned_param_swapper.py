"""ZeRO-3's swapping of parameter partitions to NVMe: files, host buffers and what stays in memory.

It repeats ``AsyncPartitionedParameterSwapper`` (deepspeed/runtime/swap_tensor/partitioned_param_swapper.py,
DeepSpeed 0.19). A file has at least a mebibyte: smaller partitions stay in memory. Rehearsed with DeepSpeed's
own swappers (``rehearsal/fake_files.py``), and compared with the files of real ranks
(``tests/runs/test_nvme_ranks.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from shardscope.core.ops import ceil_div
from shardscope.core.precision import widths
from shardscope.frameworks.deepspeed.memory.partition_parameters import (
    RankTensors,
    create_sub_groups,
    split_by_decay,
    sum_partitions,
)

if TYPE_CHECKING:
    from shardscope.core.recipe import Recipe
    from shardscope.frameworks.deepspeed.layout import ZeroLayout

MIN_FILE_BYTES = 2**20
"""Minimum size of a swapped tensor (``MIN_AIO_BYTES`` and the default ``block_size``)."""
ALIGNED_BYTES = 1024
"""Alignment of files and their buffers (``AIO_ALIGNED_BYTES``, one thread per request)."""

SwapFailure = Literal["no buffer", "read twice"]
"""``Not enough buffers 0 for swapping 1`` and ``param 41 already assigned swap buffer id 12``
(``AsyncPartitionedParameterSwapper``); both are what real ranks do (``tests/runs/test_nvme_ranks.py``)."""


class NvmeOptions(NamedTuple):
    """Options of swapping to NVMe."""

    swaps_params: bool
    swaps_optimizer: bool
    half: int
    """Bytes of a weight."""
    sub_group_size: int
    max_in_cpu: int
    """Elements of weights that stay in host memory (``max_in_cpu``)."""
    num_buffers: int
    """Number of host buffers for weights being swapped."""


def get_nvme_options(layout: ZeroLayout, recipe: Recipe) -> NvmeOptions:
    """Return the swapping options of a layout that offloads to NVMe."""
    return NvmeOptions(
        layout.offload_params == "nvme",
        layout.offload_optimizer == "nvme",
        widths[recipe.precision].compute,
        layout.sub_group_size,
        layout.offload_params_max_in_cpu,
        layout.num_params_buffers,
    )


def align_bytes(num_elements: int, width: int) -> int:
    """Return the aligned bytes of a file or buffer of ``num_elements``."""
    return ceil_div(width * num_elements, ALIGNED_BYTES) * ALIGNED_BYTES


def is_swappable(num_elements: int, width: int) -> bool:
    """Return whether a tensor is large enough to be swapped (``swappable_tensor``)."""
    return width * num_elements >= MIN_FILE_BYTES


class AsyncPartitionedParameterSwapper:
    """Parameter partitions that are on NVMe, and the buffers for reading them, in one step."""

    def __init__(
        self, partitions: list[int], trained: list[bool], persistent: list[bool], options: NvmeOptions
    ) -> None:
        in_memory = _find_partitions_in_memory(partitions, trained, options)
        self._swapped = frozenset(
            index for index in range(len(partitions)) if not (in_memory[index] or persistent[index])
        )
        self.on_nvme = set(self._swapped)
        """Parameters whose partitions are on NVMe only."""
        self.is_on_nvme = np.zeros(len(partitions), np.bool_)
        """The same as a mask."""
        self.is_on_nvme[list(self._swapped)] = True
        self.available_swap_in_buffers = options.num_buffers
        self.read_elements = 0
        """Elements of all reads so far."""
        self.written_elements = sum(partitions[index] for index in self._swapped if trained[index])
        """Elements that the optimizer step writes (``_partitioned_params_swap_out``, stage3.py)."""
        self._partitions = partitions
        self.failure: SwapFailure | None = None
        """First assertion that DeepSpeed fails; None if there is none."""

    def swap_in(self, params: list[int]) -> None:
        """Read partitions into buffers, if they are not in memory.

        DeepSpeed's prefetching lists a parameter once per use, and fails if one is listed twice.
        """
        if len(set(params)) < len(params) and self.failure is None:
            self.failure = "read twice"
        for index in params:
            if index in self.on_nvme:
                self.on_nvme.discard(index)
                self.is_on_nvme[index] = False
                self.read_elements += self._partitions[index]
                self.available_swap_in_buffers -= 1
                if self.available_swap_in_buffers < 0 and self.failure is None:
                    self.failure = "no buffer"

    def remove_partition_and_release_buffers(self, index: int) -> None:
        """Free the buffer of a parameter whose all-gathered memory is released."""
        if index in self._swapped and index not in self.on_nvme:
            self.on_nvme.add(index)
            self.is_on_nvme[index] = True
            self.available_swap_in_buffers += 1


def _find_partitions_in_memory(
    partitions: list[int], trained: list[bool], options: NvmeOptions
) -> list[bool]:
    """Return which partitions are always in memory: small ones, and sub-groups up to ``max_in_cpu``.

    Frozen weights are in no sub-group, and on NVMe if they are large enough. Vectors are counted in model
    order though they are a separate group: none is large enough for a file, and they are too small to matter.
    """
    in_memory = [not is_swappable(partition, options.half) for partition in partitions]
    trained_indices = [index for index, is_trained in enumerate(trained) if is_trained]
    trained_partitions = tuple(partitions[index] for index in trained_indices)
    elements = start = 0
    for sub_group in create_sub_groups(trained_partitions, 1, options.sub_group_size):
        elements += sum(sub_group)
        for index in trained_indices[start : start + len(sub_group)]:
            in_memory[index] = in_memory[index] or elements <= options.max_in_cpu
        start += len(sub_group)
    return in_memory


def count_parameter_bytes(
    tensors: RankTensors, tied_head: tuple[int, ...], ranks: int, options: NvmeOptions
) -> tuple[int, int]:
    """Return (file bytes, host bytes) of the swapped weights, without the buffers for reading them.

    ``tied_head`` is the head's tensor of a model that ties it to the embedding only after it was partitioned:
    it leaves a file behind.
    """
    half = options.half
    partitions = [ceil_div(size, ranks) for size in (*tensors.trained, *tensors.frozen, *tied_head)]
    files = sum(align_bytes(part, half) for part in partitions if is_swappable(part, half))
    host = elements = largest_partitions = 0
    largest_sub_group: list[int] = []
    not_in_flat_buffer = list(tensors.frozen)
    # DeepSpeed allocates up to ``max_in_cpu`` per parameter group, even if the next sub-group does not fit
    # (``_create_param_groups_fp16_flat_cpu_memory``).
    for group in split_by_decay(tensors.trained, tensors.is_vector):
        group_partitions = sum_partitions(tuple(group), ranks)
        flat_buffer = min(group_partitions, max(0, options.max_in_cpu - elements))
        host, elements = host + half * flat_buffer, elements + group_partitions
        offset = 0
        for sub_group in create_sub_groups(tuple(group), ranks, options.sub_group_size):
            sub_group_partitions = sum_partitions(tuple(sub_group), ranks)
            offset += sub_group_partitions
            if offset > flat_buffer:
                not_in_flat_buffer += sub_group
            if sub_group_partitions > largest_partitions:
                largest_sub_group, largest_partitions = sub_group, sub_group_partitions
    loose = [ceil_div(size, ranks) for size in not_in_flat_buffer]
    host += sum(half * part for part in loose if not is_swappable(part, half))
    if elements > options.max_in_cpu:
        # DeepSpeed reserves the largest sub-group's unpartitioned tensors, not this rank's partitions.
        host += sum(align_bytes(size, half) for size in largest_sub_group)
    return files, host
