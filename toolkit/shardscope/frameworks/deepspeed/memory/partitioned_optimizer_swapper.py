"""ZeRO-3's swapping of optimizer state and gradients to NVMe: files, host buffers and gradients that stay.

It repeats ``PartitionedOptimizerSwapper`` (deepspeed/runtime/swap_tensor/partitioned_optimizer_swapper.py and
optimizer_utils.py, DeepSpeed 0.19). A sub-group's main copies, moments and gradients are files.
"""

from __future__ import annotations

from shardscope.core.ops import ceil_div
from shardscope.core.precision import FP32
from shardscope.frameworks.deepspeed.memory.partition_parameters import FP64, RankTensors, create_sub_groups
from shardscope.frameworks.deepspeed.memory.partitioned_param_swapper import (
    ALIGNED_BYTES,
    NvmeOptions,
    align_bytes,
    is_swappable,
)

NORM_ELEMENTS = 250_000_000
"""Elements of a gradient in one step of stage 3's norm computation (``_constant_buffered_norm2``,
deepspeed/runtime/zero/stage3.py)."""


def stays_on_device(partition: int) -> bool:
    """Return whether a gradient stays on the device in fp32: too small for a file, or not aligned.

    The unaligned remainder is a view, which keeps the whole gradient allocated
    (``_adjust_for_misaligned_lengths``, optimizer_utils.py).
    """
    return not is_swappable(partition, FP32) or bool(FP32 * partition % ALIGNED_BYTES)


class PartitionedOptimizerSwapper:
    """Gradients of one step that are swapped out as buckets are reduced, in elements of the weights' type."""

    def __init__(self, partitions: list[int], half: int) -> None:
        self.unswapped_gradients = 0
        """Reduced fp32 gradients that stay on the device."""
        self._partitions, self._half = partitions, half
        self._bucket: list[int] = []

    def add_gradient(self, index: int) -> None:
        """Record a parameter whose gradient is in the bucket."""
        self._bucket.append(index)

    def swap_out_gradients(self) -> int:
        """Swap out the reduced bucket and return the temporary elements.

        Each partition is copied back from the host for its norm, then copied in fp32; writing starts when all
        copies exist. The result excludes the gradients that stay on the device.
        """
        half, unswapped = self._half, self.unswapped_gradients * self._half
        copied = peak = 0
        # DeepSpeed sorts the gradients of a bucket by parameter id.
        for partition in (self._partitions[index] for index in sorted(self._bucket)):
            copy = FP32 * partition
            norm = FP64 * min(partition, NORM_ELEMENTS)
            peak = max(peak, unswapped + copied + half * partition + max(norm, copy))
            if stays_on_device(partition):
                unswapped += copy
            else:
                copied += copy
        self._bucket.clear()
        self.unswapped_gradients = unswapped // half
        return max(0, peak - unswapped, copied) // half


def count_optimizer_bytes(
    tensors: RankTensors, ranks: int, moment_bytes: int, num_buffers: int, options: NvmeOptions
) -> tuple[int, int, int, int]:
    """Return the bytes of an optimizer with ``moment_bytes`` per weight.

    They are those of its files, of its gradients' files, on the host and on the device.
    """
    files = gradient_files = host = device = largest = 0
    for sub_group in create_sub_groups(tensors.trained, ranks, options.sub_group_size, tensors.is_vector):
        partitions = [ceil_div(size, ranks) for size in sub_group]
        elements = sum(partitions)
        largest = max(largest, elements)
        if not is_swappable(elements, FP32):
            # Main copies, gradients and moments stay in host memory.
            host += (2 * FP32 + moment_bytes) * elements
            continue
        files += align_bytes(elements, FP32) * (FP32 + moment_bytes) // FP32
        for partition in partitions:
            if is_swappable(partition, FP32):
                gradient_files += FP32 * partition // ALIGNED_BYTES * ALIGNED_BYTES
            device += FP32 * partition if stays_on_device(partition) else 0
    return files, gradient_files, host + num_buffers * align_bytes(largest, FP32), device
