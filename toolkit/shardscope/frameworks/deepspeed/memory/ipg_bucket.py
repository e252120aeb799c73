"""Gradient buckets of ZeRO-1 and ZeRO-2: which ranks own their slices, and the copies that a reduction makes.

It repeats how ``DeepSpeedZeroOptimizer`` reduces an ``IPGBucket`` (deepspeed/runtime/zero/stage_1_and_2.py,
DeepSpeed 0.19: ``average_tensor``, ``allreduce_and_scatter``, ``allreduce_bucket``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class FlatGradient(NamedTuple):
    """Position of a gradient in the flat buffer of its parameter group, matrices or vectors."""

    start: int
    size: int
    partition: int
    """Elements of each rank's partition of that buffer."""

    @property
    def end(self) -> int:
        """Offset after its last element."""
        return self.start + self.size

    def count_owned_by(self, rank: int) -> int:
        """Return how many of its elements are in the partition of ``rank``."""
        return max(0, min(self.end, (rank + 1) * self.partition) - max(self.start, rank * self.partition))


class ReductionOptions(NamedTuple):
    """Partitions of the flat gradient buffers over ranks, and how buckets are reduced to them."""

    partitions: tuple[int, int]
    """Elements of each rank's partitions: of matrices, and of vectors."""
    rank: int
    """Rank whose memory is computed."""
    overlapping: int
    """Elements of all tensors that overlap this rank's partition."""
    bucket_size: int
    """``reduce_bucket_size``, in elements."""
    partitions_gradients: bool = True
    """Whether gradients of other ranks' partitions are freed after the reduction (stage 2). Stage 1 keeps
    them, so gradients too large for the bucket stay allocated."""
    norm_width: int = 0
    """Size of an fp64 element in gradient elements, if reduced gradients are offloaded one by one with their
    norm in double precision; 0 if they stay on the device."""
    cast_width: int = 0
    """Size of an element of the reduction type in gradient elements; 0 if gradients are not cast."""
    is_contiguous: bool = True
    """Whether gradients are copied into a buffer. Else the bucket is a list of autograd's tensors, flattened
    for the reduction, and reduced gradients stay where they are."""
    frees_late: bool = False
    """Whether gradients of other ranks' partitions are freed at the next reduction and not after their own:
    with ``overlap_comm``, if they are not contiguous."""

    @property
    def accumulated(self) -> int:
        """Elements of gradients that stay on the device after the first reduction."""
        return 0 if self.norm_width else self.overlapping

    def is_own(self, gradient: FlatGradient) -> bool:
        """Return whether ``gradient`` overlaps the rank's partitions."""
        rank, partition = self.rank, gradient.partition
        return gradient.start < (rank + 1) * partition and rank * partition < gradient.end

    def has_own(self, bucket: Sequence[FlatGradient]) -> bool:
        """Return whether any gradient of ``bucket`` overlaps the rank's partitions."""
        return any(self.is_own(gradient) for gradient in bucket)


class BucketCounts(NamedTuple):
    """Buckets in which one reduction of all gradients is made."""

    number: int
    last: int
    """Elements of the last one: its reduction starts when backward has ended."""
    owned: int = 0
    """Sum over the buckets of the elements that their busiest rank owns, and copies to the host."""
    overlapping: int = 0
    """The same with whole tensors in place of their owned slices."""


# Cached: stages 0 and 1 with every offload have the same.
@lru_cache(maxsize=256)
def place_gradients(
    sizes: tuple[int, ...], is_vector: tuple[bool, ...], partitions: tuple[int, int]
) -> tuple[FlatGradient, ...]:
    """Return the position of each tensor of ``sizes`` in its flat buffer.

    ``is_vector`` has a flag for each tensor (empty: none is a vector); ``partitions`` are as in
    :class:`ReductionOptions`.
    """
    ends = [0, 0]
    gradients: list[FlatGradient] = []
    for size, flag in zip(sizes, is_vector or (False,) * len(sizes), strict=True):
        gradients.append(FlatGradient(ends[flag], size, partitions[flag]))
        ends[flag] += size
    return tuple(gradients)


def find_bucket_ends(sizes: Sequence[int], bucket_size: int) -> list[int]:
    """Return the index after the last gradient of each bucket; a gradient that does not fit begins one."""
    ends = list(accumulate(sizes))
    indices: list[int] = []
    first = before = 0
    while first < len(ends):
        first = max(first + 1, bisect_right(ends, before + bucket_size, first))
        before = ends[first - 1]
        indices.append(first)
    return indices


def count_buckets(
    gradients: Sequence[FlatGradient], bucket_size: int, *, finds_busiest: bool
) -> BucketCounts:
    """Return the buckets of ``gradients``, in the order in which they are reduced.

    ``finds_busiest``: count what the busiest rank of each bucket copies to the host. A bucket has consecutive
    tensors, so it belongs to few ranks, and the next all-reduce waits for them.
    """
    ends = find_bucket_ends([gradient.size for gradient in gradients], bucket_size)
    buckets = [gradients[first:end] for first, end in zip([0, *ends], ends, strict=False)]
    last = sum([gradient.size for gradient in buckets[-1]]) if buckets else 0
    if not finds_busiest:
        return BucketCounts(len(buckets), last)
    owned, overlapping = zip((0, 0), *map(_count_of_busiest_rank, buckets), strict=True)
    return BucketCounts(len(buckets), last, sum(owned), sum(overlapping))


def _count_of_busiest_rank(bucket: Sequence[FlatGradient]) -> tuple[int, int]:
    """Return the most elements of ``bucket`` that one rank owns, and of tensors that it owns a slice of."""
    # Changes from one rank to the next: a large tensor fills the partitions of many.
    owned: Counter[int] = Counter()
    overlapping: Counter[int] = Counter()
    for start, size, partition in bucket:
        if not size:
            continue
        first, last = start // partition, (start + size - 1) // partition
        if first == last:
            owned[first] += size
            owned[last + 1] -= size
        else:
            # A part of the first partition, whole ones, and a part of the last one.
            head, tail = (first + 1) * partition - start, start + size - last * partition
            owned[first] += head
            owned[first + 1] += partition - head
            owned[last] += tail - partition
            owned[last + 1] -= tail
        overlapping[first] += size
        overlapping[last + 1] -= size
    return _find_largest_sum(owned), _find_largest_sum(overlapping)


def _find_largest_sum(changes: Mapping[int, int]) -> int:
    """Return the largest sum of ``changes`` up to any rank."""
    return max(accumulate(changes[rank] for rank in sorted(changes)), default=0)


class Reduction(NamedTuple):
    """The reduction of one bucket."""

    elements: int
    has_own: bool
    """Whether a gradient of the bucket overlaps the rank's partitions."""
    copies: int
    """Temporary elements, as :func:`count_reduction_copies` returns them."""


def list_reductions(
    sizes: tuple[int, ...], is_vector: tuple[bool, ...], options: ReductionOptions
) -> list[Reduction]:
    """Return the reductions of all gradients after backward: :func:`count_reduction_copies` over arrays.

    They are reduced group by group (``reduce_gradients``): matrices, then vectors, each in model order.
    """
    sizes_of, vectors, ends = _place_in_arrays(sizes, is_vector)
    if not len(sizes_of):
        return []
    starts = ends - sizes_of
    ends_of_buckets = np.array(find_bucket_ends(sizes_of.tolist(), options.bucket_size))
    firsts = np.concatenate(([0], ends_of_buckets[:-1]))
    elements = np.add.reduceat(sizes_of, firsts)
    partitions = np.where(vectors, options.partitions[1], options.partitions[0])
    first_owner, last_owner = starts // partitions, (ends - 1) // partitions
    has_own = np.logical_or.reduceat((first_owner <= options.rank) & (options.rank <= last_owner), firsts)
    if options.is_contiguous:
        # All are flattened together, or reduced in place if they belong to one rank.
        is_copied = np.minimum.reduceat(first_owner, firsts) != np.maximum.reduceat(last_owner, firsts)
    else:
        is_copied = ends_of_buckets - firsts > 1
    copies = elements * (is_copied + options.cast_width)
    if options.is_contiguous:
        for index in np.flatnonzero(elements > options.bucket_size):
            # A gradient larger than the bucket is alone, and reduced slice by slice.
            row = firsts[index]
            gradient = FlatGradient(int(starts[row]), int(sizes_of[row]), int(partitions[row]))
            copies[index] = count_flattened_copy([gradient], options)
        if options.norm_width:
            before, after = options.rank * partitions, (options.rank + 1) * partitions
            owned = np.maximum(np.minimum(ends, after) - np.maximum(starts, before), 0)
            np.maximum(copies, options.norm_width * np.maximum.reduceat(owned, firsts), out=copies)
    columns = elements.tolist(), has_own.tolist(), copies.tolist()
    return [Reduction._make(row) for row in zip(*columns, strict=True)]


@lru_cache(maxsize=256)
def _place_in_arrays(
    sizes: tuple[int, ...], is_vector: tuple[bool, ...]
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """Return size, kind and end in the flat buffer of each gradient with elements, matrices first."""
    all_sizes = np.array(sizes, np.int64)
    flags = np.array(is_vector, bool) if is_vector else np.zeros(len(sizes), bool)
    ends = np.where(flags, np.cumsum(all_sizes * flags), np.cumsum(all_sizes * ~flags))
    by_group = np.argsort(flags, kind="stable")
    order = by_group[all_sizes[by_group] > 0]
    return all_sizes[order], flags[order], ends[order]


def count_reduction_copies(bucket: Sequence[FlatGradient], options: ReductionOptions) -> int:
    """Return the temporary elements of reducing a full bucket.

    They are a flattened copy, then the norms of offloaded gradients (``set_norm_for_param_grad_in_gpu``).
    """
    if not options.is_contiguous:
        return count_copy(sum(gradient.size for gradient in bucket), len(bucket), options.cast_width)
    flattened = count_flattened_copy(bucket, options)
    if not options.norm_width:
        return flattened
    largest = max((gradient.count_owned_by(options.rank) for gradient in bucket), default=0)
    return max(flattened, options.norm_width * largest)


def count_flattened_copy(bucket: Sequence[FlatGradient], options: ReductionOptions) -> int:
    """Return the elements of the largest flattened copy in ``allreduce_and_scatter``, over slices by rank."""
    elements = sum([gradient.size for gradient in bucket])
    if elements <= options.bucket_size:
        # All are flattened together, or reduced in place if they belong to one rank.
        owners = {
            owner
            for start, size, partition in bucket
            if size
            for owner in (start // partition, (start + size - 1) // partition)
        }
        return count_copy(elements, len(owners), options.cast_width)
    return find_largest_copy(_list_slices(bucket), options.bucket_size, options.cast_width)


def _list_slices(bucket: Sequence[FlatGradient]) -> list[tuple[int, int]]:
    """Return (size, number of consecutive slices of that size) of a bucket's slices by destination rank."""
    runs: list[tuple[int, int]] = []
    owner = -1
    for gradient in bucket:
        if not gradient.size:
            continue
        first_owner = gradient.start // gradient.partition
        head = min(gradient.end, (first_owner + 1) * gradient.partition) - gradient.start
        if first_owner == owner:
            # Merge with the previous run's last slice only: the vectors' buffer starts again at rank 0.
            size, count = runs.pop()
            if count > 1:
                runs.append((size, count - 1))
            runs.append((size + head, 1))
        else:
            runs.append((head, 1))
        # After the rest of the first owner's partition: complete partitions, and a part of the last one.
        num_partitions, tail = divmod(gradient.size - head, gradient.partition)
        if num_partitions:
            runs.append((gradient.partition, num_partitions))
        if tail:
            runs.append((tail, 1))
        owner = first_owner + num_partitions + (tail > 0)
    return runs


def find_largest_copy(slices: list[tuple[int, int]], max_elements: int, cast_width: int) -> int:
    """Return the elements of the largest flattened copy; one ends with the slice that exceeds the maximum.

    ``slices`` are (size of a slice, number of consecutive slices of that size).
    """
    # DeepSpeed collects slices until they exceed the maximum, then reduces these (allreduce_no_retain).
    largest = elements = number = 0
    for size, count in slices:
        remaining = count
        while remaining:
            needed = (max_elements - elements) // size + 1 if size else remaining + 1
            added = min(needed, remaining)
            elements, number, remaining = elements + added * size, number + added, remaining - added
            if elements > max_elements:
                largest = max(largest, count_copy(elements, number, cast_width))
                elements = number = 0
                # The following copies have equally many slices, so they are all of one size: skip them.
                per_copy = max_elements // size + 1
                if remaining >= per_copy:
                    largest = max(largest, count_copy(per_copy * size, per_copy, cast_width))
                    remaining %= per_copy
    return max(largest, count_copy(elements, number, cast_width))


def count_copy(elements: int, num_slices: int, cast_width: int) -> int:
    """Return the elements copied to reduce ``num_slices`` slices together.

    A single slice is flat already; a cast is allocated besides the flattened copy (``allreduce_bucket``).
    """
    return elements * ((num_slices > 1) + cast_width)
