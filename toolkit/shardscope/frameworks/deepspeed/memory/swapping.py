"""What stage 3 writes to NVMe, part by part, and what it keeps of that in memory (``runtime/swap_tensor``).

A file holds at least a mebibyte: smaller parts stay where they are made. Rehearsed by DeepSpeed's own
swappers (``rehearsal/fake_files.py``), and held against files of real ranks
(``tests/runs/test_nvme_ranks.py``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardscope.core.arrays.arithmetic import ceil_div, looked_up
from shardscope.core.precision import FP32, widths
from shardscope.frameworks.deepspeed.memory.tensors import (
    FP64,
    Tensors,
    by_decay,
    cut_each,
    sub_groups,
    tensors_on,
)
from shardscope.memory.state.optimizers import flat_state

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.memory.state.stages import Stage

MIN_FILE_BYTES = 2**20
"""Least that is swapped (``MIN_AIO_BYTES`` and the default ``block_size``)."""
ALIGNED_BYTES = 1024
"""To which files and their buffers round up (``AIO_ALIGNED_BYTES``, one thread for a request)."""


NORM_ELEMENTS = 250_000_000
"""Numbers of a gradient of which stage 3 takes the norm at once."""


class Swaps(NamedTuple):
    """What a layout moves to NVMe, and how."""

    weights: bool
    state: bool
    half: int
    """Bytes of a weight."""
    sub_group_size: int
    max_in_cpu: int
    """Elements of weights that stay in host memory."""
    num_buffers: int
    """Weights that are in host memory at once, on their way."""


def swaps_of(layout: Any, recipe: Recipe) -> Swaps | None:
    """What ``layout`` moves to NVMe; None: nothing."""
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
    """Bytes of one rank, those of buffers for weights excluded."""

    weight_files: int
    weight_host: int
    state_files: int
    """Main copies, moments and gradients."""
    state_host: int
    """Their buffers, and sub-groups that are too small for files."""
    state_device: int
    """fp32 gradients that are no files: they wait on the device until their sub-group is updated."""


def aligned(num_elements: Any, width: int) -> Any:
    """Bytes of so many elements in a file or in a buffer of its own."""
    return ceil_div(width * num_elements, ALIGNED_BYTES) * ALIGNED_BYTES


def is_file(num_elements: int, width: int) -> bool:
    """Whether a tensor is large enough to be swapped."""
    return width * num_elements >= MIN_FILE_BYTES


def stays_whole(part: int) -> bool:
    """Whether a gradient waits on the device in fp32: too small for a file, or with a rest that is.

    The rest is a view, which keeps all of it (``_adjust_for_misaligned_lengths``, optimizer_utils.py).
    """
    return not is_file(part, FP32) or bool(FP32 * part % ALIGNED_BYTES)


def kept_in_memory(parts: list[int], trained: list[bool], swaps: Swaps) -> list[bool]:
    """Which weights are in memory all the time: the first sub-groups while there is room, and small ones.

    What is frozen is in no sub-group, and on NVMe if it is large enough. Vectors, a group of their own, are
    counted where they stand: none is large enough for a file, and all of them are too few to matter.
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
    """Parts of weights that come and go through buffers, and gradients on their way to files, in one step."""

    def __init__(
        self, parts: list[int], trained: list[bool], persists: list[bool], swaps: Swaps | None
    ) -> None:
        self.kept = 0
        """Reduced gradients that stay on the device, in elements of the others' type."""
        self.free = swaps.num_buffers if swaps else 0
        self.away: set[int] = set()
        """Tensors whose parts are on NVMe only."""
        self.failure: SwapFailure | None = None
        """Of what DeepSpeed asserts, what came first."""
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
        """Whether a tensor's part would have to be read."""
        return index in self.away

    def read(self, index: int) -> None:
        """Into a buffer, if it is not in memory."""
        if index in self.away:
            self.away.discard(index)
            self.free -= 1
            if self.free < 0 and self.failure is None:
                self.failure = "no buffer"

    def read_ahead(self, indices: list[int]) -> None:
        """Those that come next; DeepSpeed lists a tensor as often as it comes, and fails over the second."""
        if len(set(indices)) < len(indices) and self.failure is None:
            self.failure = "read twice"
        for index in indices:
            self.read(index)

    def give_back(self, index: int) -> None:
        """Its buffer is free as soon as the gathered tensor is released."""
        if index in self._swapped and index not in self.away:
            self.away.add(index)
            self.free += 1

    def wait(self, index: int) -> None:
        """A gradient is in the bucket."""
        if self._parts:
            self._waiting.append(index)

    def reduce(self) -> int:
        """The bucket is reduced: part by part comes back from the host, has its norm taken and is copied in
        fp32; the first is written when all are there. The most of that beside what is kept in the end, in
        elements of the others' type."""
        half, kept = self._half, self.kept * self._half
        copied = most = 0
        # DeepSpeed sorts what it reduces together by when it was made.
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
    """What one rank of ``stage`` has on NVMe, and in memory because of it; None: nothing is swapped."""
    swaps = swaps_of(plan.layout, plan.recipe)
    if swaps is None:
        return None
    arch, recipe, layout = plan.architecture, plan.recipe, plan.layout
    adapted = recipe if recipe.has_adapters else None
    moments = flat_state(recipe.optimizer, 1)
    buffers: int = layout.offload_optimizer_buffer_count  # type: ignore[attr-defined]

    def count(ranks: int, dense: int, moe: int) -> Swapped:
        return _swapped(arch, adapted, ranks, dense, moe, swaps, moments, buffers)

    moe = stage.num_moe_layers
    found: Swapped = looked_up(count, plan.degrees.data_parallel, stage.num_layers - moe, moe)
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
    # A head has a tensor of its own until it is tied to the embedding. What has experts is cut when it is
    # whole (transformers' modules of experts do not come up inside of zero.Init).
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
    """Files and host; of the last ``num_gone`` tensors of ``frozen`` there are only the files."""
    half = swaps.half
    files = sum(
        aligned(part, half)
        for part in (ceil_div(size, ranks) for size in (*tensors.trained, *frozen))
        if is_file(part, half)
    )
    host = numbers = widest = 0
    fullest: list[int] = []
    loose = list(frozen[: len(frozen) - num_gone])
    # Room is made for all that may be there, whether or not a sub-group fits, group by group
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
        # Reserved for the largest sub-group's whole tensors, not for this rank's parts of them.
        host += sum(aligned(size, half) for size in fullest)
    return files, host


def _state(tensors: Tensors, ranks: int, moments: int, buffers: int, swaps: Swaps) -> tuple[int, int, int]:
    """Files, host and device, of an optimizer that keeps ``moments`` bytes a weight."""
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
