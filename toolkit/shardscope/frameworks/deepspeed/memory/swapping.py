"""ZeRO-3's swapping to NVMe: file sizes, host buffers and what stays in memory (``runtime/swap_tensor``).

A file has at least a mebibyte: smaller partitions stay in memory. Rehearsed with DeepSpeed's own swappers
(``rehearsal/fake_files.py``), and compared with the files of real ranks (``tests/runs/test_nvme_ranks.py``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardscope.core.ops import ceil_div, map_distinct
from shardscope.core.precision import FP32, widths
from shardscope.frameworks.deepspeed.memory.tensors import (
    FP64,
    Tensors,
    by_decay,
    cut_each,
    sub_groups,
    tensors_on,
)
from shardscope.memory.state.optimizers import compute_flat_state

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.memory.state.stages import Stage

MIN_FILE_BYTES = 2**20
"""Minimum size of a swapped tensor (``MIN_AIO_BYTES`` and the default ``block_size``)."""
ALIGNED_BYTES = 1024
"""Alignment of files and their buffers (``AIO_ALIGNED_BYTES``, one thread per request)."""


NORM_ELEMENTS = 250_000_000
"""Elements of a gradient in one step of stage 3's norm computation."""


class Swaps(NamedTuple):
    """Options of swapping to NVMe."""

    weights: bool
    state: bool
    half: int
    """Bytes of a weight."""
    sub_group_size: int
    max_in_cpu: int
    """Elements of weights that stay in host memory (``max_in_cpu``)."""
    num_buffers: int
    """Number of host buffers for weights being swapped."""


def swaps_of(layout: Any, recipe: Recipe) -> Swaps | None:
    """Return the swapping options of ``layout``; None if nothing is swapped to NVMe."""
    weights, state = layout.offload_params == "nvme", layout.offload_optimizer == "nvme"
    if not (weights or state):
        return None
    return Swaps(
        weights,
        state,
        widths[recipe.precision].compute,
        layout.sub_group_size,
        layout.offload_params_max_in_cpu,
        layout.num_params_buffers,
    )


class Swapped(NamedTuple):
    """Bytes of swapped tensors on one rank, without the buffers for weights."""

    weight_files: int
    weight_host: int
    state_files: int
    """Main copies, moments and gradients in files."""
    state_host: int
    """Host buffers of these, and sub-groups that are too small for files."""
    state_device: int
    """fp32 gradients that cannot be files: they stay on the device until their sub-group is updated."""


def aligned(num_elements: Any, width: int) -> Any:
    """Return the aligned bytes of a file or buffer of ``num_elements``."""
    return ceil_div(width * num_elements, ALIGNED_BYTES) * ALIGNED_BYTES


def is_file(num_elements: int, width: int) -> bool:
    """Return whether a tensor is large enough to be swapped."""
    return width * num_elements >= MIN_FILE_BYTES


def stays_whole(part: int) -> bool:
    """Return whether a gradient stays on the device in fp32: too small for a file, or not aligned.

    The unaligned remainder is a view, which keeps the whole gradient allocated
    (``_adjust_for_misaligned_lengths``, optimizer_utils.py).
    """
    return not is_file(part, FP32) or bool(FP32 * part % ALIGNED_BYTES)


def kept_in_memory(parts: list[int], trained: list[bool], swaps: Swaps) -> list[bool]:
    """Return which weights are always in memory: the first sub-groups up to ``max_in_cpu``, and small ones.

    Frozen weights are in no sub-group, and on NVMe if they are large enough. Vectors are counted in model
    order though they are a separate group: none is large enough for a file, and they are too small to matter.
    """
    stays = [not is_file(part, swaps.half) for part in parts]
    mine = [index for index, is_trained in enumerate(trained) if is_trained]
    filled = place = 0
    for group in sub_groups(tuple(parts[index] for index in mine), 1, swaps.sub_group_size):
        filled += sum(group)
        for index in mine[place : place + len(group)]:
            stays[index] = stays[index] or filled <= swaps.max_in_cpu
        place += len(group)
    return stays


SwapFailure = Literal["no buffer", "read twice"]
"""``Not enough buffers 0 for swapping 1`` and ``param 41 already assigned swap buffer id 12``
(``AsyncPartitionedParameterSwapper``); both are what real ranks do (``tests/runs/test_nvme_ranks.py``)."""


class Swapper:
    """Swapping of weight partitions through buffers, and of gradients to files, in one step."""

    def __init__(
        self, parts: list[int], trained: list[bool], persists: list[bool], swaps: Swaps | None
    ) -> None:
        self.kept = 0
        """Reduced fp32 gradients that stay on the device, in elements of the weights' type."""
        self.free = swaps.num_buffers if swaps else 0
        self.away: set[int] = set()
        """Tensors whose partitions are on NVMe only."""
        self.failure: SwapFailure | None = None
        """First assertion that DeepSpeed fails; None if there is none."""
        self._swapped: frozenset[int] = frozenset()
        self._parts: list[int] = []
        self._half = 1
        self._waiting: list[int] = []
        if swaps and swaps.weights:
            stays = kept_in_memory(parts, trained, swaps)
            self.away = {index for index in range(len(parts)) if not (stays[index] or persists[index])}
            self._swapped = frozenset(self.away)
        if swaps and swaps.state:
            self._parts, self._half = parts, swaps.half

    def is_away(self, index: int) -> bool:
        """Return whether a tensor's partition is on NVMe only."""
        return index in self.away

    def read(self, index: int) -> None:
        """Read a tensor's partition into a buffer, if it is not in memory."""
        if index in self.away:
            self.away.discard(index)
            self.free -= 1
            if self.free < 0 and self.failure is None:
                self.failure = "no buffer"

    def read_ahead(self, indices: list[int]) -> None:
        """Prefetch tensors; DeepSpeed lists a tensor once per use, and fails if one is listed twice."""
        if len(set(indices)) < len(indices) and self.failure is None:
            self.failure = "read twice"
        for index in indices:
            self.read(index)

    def give_back(self, index: int) -> None:
        """Free the buffer of a tensor whose all-gathered parameter is released."""
        if index in self._swapped and index not in self.away:
            self.away.add(index)
            self.free += 1

    def wait(self, index: int) -> None:
        """Record a gradient in the bucket."""
        if self._parts:
            self._waiting.append(index)

    def reduce(self) -> int:
        """Swap out the reduced bucket and return the temporary elements, in the weights' type.

        Each partition is copied back from the host for its norm, then copied in fp32; writing starts when all
        copies exist. The result excludes the gradients that stay on the device.
        """
        half, kept = self._half, self.kept * self._half
        copied = most = 0
        # DeepSpeed sorts the gradients of a bucket by parameter id.
        for part in (self._parts[index] for index in sorted(self._waiting)):
            copy = FP32 * part
            most = max(most, kept + copied + half * part + max(FP64 * min(part, NORM_ELEMENTS), copy))
            if stays_whole(part):
                kept += copy
            else:
                copied += copy
        self._waiting.clear()
        self.kept = kept // half
        return max(0, most - kept, copied) // half


def swapped(plan: Plan, stage: Stage) -> Swapped | None:
    """Return one rank's bytes on NVMe and of its buffers in memory; None if nothing is swapped."""
    swaps = swaps_of(plan.layout, plan.recipe)
    if swaps is None:
        return None
    arch, recipe, layout = plan.architecture, plan.recipe, plan.layout
    adapted = recipe if recipe.has_adapters else None
    moments = compute_flat_state(recipe.optimizer, 1)
    buffers: int = layout.offload_optimizer_buffer_count  # type: ignore[attr-defined]

    def count(ranks: int, dense: int, moe: int) -> Swapped:
        return _swapped(arch, adapted, ranks, dense, moe, swaps, moments, buffers)

    moe = stage.num_moe_layers
    found: Swapped = map_distinct(count, plan.degrees.data_parallel, stage.num_layers - moe, moe)
    return found


@lru_cache(maxsize=1024)
def _swapped(
    arch: Architecture,
    adapted: Recipe | None,
    ranks: int,
    dense: int,
    moe: int,
    swaps: Swaps,
    moments: int,
    buffers: int,
) -> Swapped:
    tensors = tensors_on(arch, adapted, 1, 1, dense, moe, 1, 1)
    # A head has its own tensor, and so its own file, until it is tied to the embedding. Models with experts
    # are partitioned after they are built (transformers' expert modules cannot be built inside zero.Init).
    tied = tensors.used[:1] if arch.tie_word_embeddings and arch.mixture_of_experts is None else ()
    weights, state = (0, 0), (0, 0, 0)
    if swaps.weights:
        weights = _weights(tensors, (*tensors.frozen, *tied), ranks, swaps, len(tied))
    if swaps.state:
        state = _state(tensors, ranks, moments, buffers, swaps)
    return Swapped(*weights, *state)


def _weights(
    tensors: Tensors, frozen: tuple[int, ...], ranks: int, swaps: Swaps, num_gone: int
) -> tuple[int, int]:
    """Return (file bytes, host bytes); the last ``num_gone`` tensors of ``frozen`` have only files."""
    half = swaps.half
    files = sum(
        aligned(part, half)
        for part in (ceil_div(size, ranks) for size in (*tensors.trained, *frozen))
        if is_file(part, half)
    )
    host = numbers = widest = 0
    fullest: list[int] = []
    loose = list(frozen[: len(frozen) - num_gone])
    # DeepSpeed allocates up to ``max_in_cpu`` per parameter group, even if the next sub-group does not fit
    # (``_create_param_groups_fp16_flat_cpu_memory``).
    for decaying in by_decay(tensors.trained, tensors.vectors):
        own = cut_each(tuple(decaying), ranks)
        room = min(own, max(0, swaps.max_in_cpu - numbers))
        host, numbers, filled = host + half * room, numbers + own, 0
        for group in sub_groups(tuple(decaying), ranks, swaps.sub_group_size):
            parts = cut_each(tuple(group), ranks)
            filled += parts
            if filled > room:
                loose += group
            if parts > widest:
                fullest, widest = group, parts
    host += sum(half * part for part in (ceil_div(size, ranks) for size in loose) if not is_file(part, half))
    if numbers > swaps.max_in_cpu:
        # DeepSpeed reserves the largest sub-group's unpartitioned tensors, not this rank's partitions.
        host += sum(aligned(size, half) for size in fullest)
    return files, host


def _state(tensors: Tensors, ranks: int, moments: int, buffers: int, swaps: Swaps) -> tuple[int, int, int]:
    """Return (file, host, device) bytes of an optimizer with ``moments`` bytes per weight."""
    files = host = device = widest = 0
    for group in sub_groups(tensors.trained, ranks, swaps.sub_group_size, tensors.vectors):
        parts = [ceil_div(size, ranks) for size in group]
        widest = max(widest, sum(parts))
        if not is_file(sum(parts), FP32):
            host += (2 * FP32 + moments) * sum(parts)
            continue
        files += aligned(sum(parts), FP32) * (FP32 + moments) // FP32
        for part in parts:
            if is_file(part, FP32):
                files += FP32 * part // ALIGNED_BYTES * ALIGNED_BYTES
            device += FP32 * part if stays_whole(part) else 0
    return files, host + buffers * aligned(widest, FP32), device
