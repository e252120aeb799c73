"""One layer's training state on the ranks of a replica group: the result of a framework's ``sharding.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Interval = tuple[float, float]
"""Start and end of a part of the layer, as shares of its weights in the model's order."""
Slices = tuple[tuple[Interval, ...], ...]
"""The parts that each rank of the group holds."""
WHOLE: tuple[Interval, ...] = ((0.0, 1.0),)


class StateSharding(NamedTuple):
    """Which parts of one layer the ranks of a data-parallel group hold, and when they hold all of it.

    Parts are shares of what one tensor-parallel rank has of the layer.
    """

    parameters: Slices
    """Between steps."""
    gradients: Slices
    """After their reduction."""
    optimizer: Slices
    cut: str
    """How a rank's part is cut out of the layer, as a sentence."""
    source: str
    gathers_for_passes: bool = False
    """Whether parameters are all-gathered before the layer's forward and backward; else, if they are
    all-gathered at all, after the optimizer step."""
    after_forward: Slices | None = None
    """Parameters between forward and backward, if these are not the parts held between steps."""
    buffers_gradients: bool = False
    """Whether unreduced gradients are in memory that ``TrainingState.gradients`` counts in full; else they
    are temporary, and reduced layer by layer."""
    keeps_whole_buffer: bool = False
    """Whether that buffer stays whole after the reduction, which then fills each rank's own part of it."""
    gradient_bytes: tuple[int, ...] | None = None
    """Bytes of reduced gradients by rank, where a rank keeps whole tensors; None: equal parts."""
    experts: StateSharding | None = None
    """The routed experts' own sharding, over the replicas of each expert; None: as all other weights."""


def replicate(ranks: int) -> Slices:
    """Return the whole layer on each rank."""
    return (WHOLE,) * ranks


def slice_evenly(ranks: int, parts: int) -> Slices:
    """Return ``1 / parts`` of the layer on each rank, repeated for every ``parts`` ranks."""
    return tuple((((rank % parts) / parts, (rank % parts + 1) / parts),) for rank in range(ranks))


def slice_buffer(tensors: Sequence[tuple[int, int]], partition: int, ranks: int) -> Slices:
    """Return the parts of a layer in a flat buffer of which each rank owns ``partition`` elements.

    ``tensors``: (start in the buffer, elements) of each tensor of the layer, in the model's order.
    """
    total = max(1, sum(elements for _, elements in tensors))
    slices: list[list[Interval]] = [[] for _ in range(ranks)]
    offset = 0
    for start, elements in tensors:
        for rank in range(start // partition, min(ranks - 1, (start + elements - 1) // partition) + 1):
            begin = max(start, rank * partition) - start
            end = min(start + elements, (rank + 1) * partition) - start
            slices[rank].append(((offset + begin) / total, (offset + end) / total))
        offset += elements
    return tuple(join_intervals(parts) for parts in slices)


def join_intervals(parts: Sequence[Interval]) -> tuple[Interval, ...]:
    """Return ``parts`` in order, with those that touch joined."""
    joined: list[Interval] = []
    for start, end in sorted(parts):
        if joined and start <= joined[-1][1] + 1e-12:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        elif end > start:
            joined.append((start, end))
    return tuple(joined)


def measure_intervals(parts: Sequence[Interval]) -> float:
    """Return the share of the layer in ``parts``, which do not overlap."""
    return sum(end - start for start, end in parts)
