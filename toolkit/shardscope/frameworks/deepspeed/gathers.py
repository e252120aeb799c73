"""What stage 3 has gathered, tensor by tensor (deepspeed/runtime/zero/partitioned_param_coordinator.py).

DeepSpeed records in the first step in which order modules come, and from then on prefetches by it and keeps
what will soon be used again. The same decisions are taken here over the tensors' sizes.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple

from shardscope.frameworks.deepspeed.buckets import Instant, Part


class Thresholds(NamedTuple):
    """Options of stage 3, in elements."""

    persistence: int
    prefetch_bucket: int
    max_live: int
    max_reuse_distance: int
    reduce_bucket: int


class Gathered(NamedTuple):
    """Elements gathered or on their way, whole gradients and reduction copies included."""

    rest: int
    """Parameters that are never cut."""
    forward: int
    """When forward ends."""
    backward: tuple[Part, ...]
    """Parts of backward; the last one is the reduction that ends it."""


@lru_cache(maxsize=1024)
def gathered(
    used: tuple[int, ...],
    num_before: int,
    per_layer: tuple[int, ...],
    tied: int,
    trained: bool,
    cuts: bool,
    recomputes: bool,
    limits: Thresholds,
) -> Gathered:
    """Follow one step over ``used`` tensors in the order of forward.

    ``num_before`` tensors come before the layers, ``per_layer`` are in each of them, the others after.
    ``recomputes`` runs each layer's forward again in its backward; ``trained``: all get gradients; ``cuts``:
    there are other ranks, one alone has everything; ``tied``: elements of a head that is the embedding.
    """
    forward = list(range(len(used)))
    # A tied head gathers the embedding again.
    again = [0] if tied else []
    num_after = len(used) - num_before - sum(per_layer)
    end = len(used) - num_after
    parts = [again + forward[::-1][:num_after]]
    for count in reversed(per_layer):
        layer = list(range(end - count, end))
        parts.append((layer if recomputes else []) + layer[::-1])
        end -= count
    # No gradient reaches an embedding under frozen layers.
    parts.append(forward[:num_before][::-1] if trained else [])
    return _Coordinator(used, [*forward, *again], parts, limits, cuts).run(trained, tied)


class _Coordinator:
    def __init__(
        self,
        sizes: tuple[int, ...],
        forward: list[int],
        parts: list[list[int]],
        limits: Thresholds,
        cuts: bool,
    ) -> None:
        self.sizes, self.limits = sizes, limits
        self.costs = sizes if cuts else (0,) * len(sizes)
        self.forward, self.parts = forward, parts
        self.trace = [*forward, *(index for part in parts for index in part)]
        self.persists = [size <= limits.persistence for size in sizes]
        self.available = {index for index, stays in enumerate(self.persists) if stays}
        self.queue = deque(enumerate(self.trace))
        self.fetched_for = [-1] * len(sizes)
        self.num_available = 0
        self.live = self.rest = sum(self.costs[index] for index in self.available)
        self.flights: dict[int, list[int]] = {}
        self.fill = self.oversized = 0

    def run(self, trained: bool, tied: int) -> Gathered:
        """The moments of :class:`Gathered`."""
        for step, index in enumerate(self.forward):
            self._fetch(step, index)
            self._release(step, index)
        forward, step, held = self.live, len(self.forward), 0
        last_use = {index: place for place, index in enumerate(self.trace)}
        found: list[Part] = []
        for place, part in enumerate(self.parts):
            # The head's gradient waits until the embedding has its own.
            waits = tied if place and trained else 0
            base = peak = self.live + self.oversized + waits
            for index in part:
                self._fetch(step, index)
                now = self.live + self.oversized + waits
                if trained and last_use[index] == step:
                    made = 2 * self.sizes[index] if tied and not index else self.sizes[index]
                    now += made + self._reduce(self.sizes[index])
                held = self.live + self.oversized
                peak = max(peak, now)
                self._release(step, index)
                step += 1
            found.append(Part(Instant(base, 0), Instant(peak, 0)))
        # The last reduction starts from the hook of the last gradient, before its module is released.
        end = Instant(held + self.fill if trained else self.live, 0)
        return Gathered(self.rest, forward, (*found, Part(end, end)))

    def _reduce(self, size: int) -> int:
        """A gradient goes into the bucket; what reducing a full one copies."""
        bucket = self.limits.reduce_bucket
        copy = 0
        if self.fill and self.fill + size > bucket:
            copy, self.fill, self.oversized = self.fill, 0, 0
        self.fill += size
        if size > bucket:
            self.oversized = size
        return copy

    def _fetch(self, step: int, index: int) -> None:
        if index in self.flights:
            self._arrive(index)
        elif index not in self.available:
            # Alone it needs no second copy.
            self.available.add(index)
            self.live += self.costs[index]
            self.num_available += self.sizes[index]
        if self.fetched_for[index] < step and self.queue:
            place, popped = self.queue.popleft()
            self.fetched_for[popped] = place
        self._prefetch()

    def _prefetch(self) -> None:
        room = min(self.limits.max_live - self.num_available, self.limits.prefetch_bucket)
        chosen: list[int] = []
        elements = 0
        while self.queue and elements < room:
            place, index = self.queue.popleft()
            self.fetched_for[index] = max(self.fetched_for[index], place)
            if index in self.available or index in self.flights or index in chosen:
                continue
            chosen.append(index)
            elements += self.sizes[index]
        if not chosen:
            return
        self.num_available += elements
        self.live += sum(self.costs[index] for index in chosen)
        flight = list(chosen)
        for index in chosen:
            self.flights[index] = flight

    def _arrive(self, index: int) -> None:
        """A coalesced gather is copied out of its flat buffer, which stays until its last tensor is used."""
        flight = self.flights.pop(index)
        if index not in self.available:
            members = list(flight)
            self.available.update(members)
            if len(members) > 1:
                self.live += sum(self.costs[member] for member in members)
        if all(self.flights.get(member) is not flight for member in flight) and len(flight) > 1:
            self.live -= sum(self.costs[member] for member in flight)

    def _release(self, step: int, index: int) -> None:
        if self.persists[index] or self.fetched_for[index] > step or index not in self.available:
            return
        traversed = 0
        for place in range(step + 1, len(self.trace)):
            later = self.trace[place]
            if traversed >= self.limits.max_reuse_distance:
                break
            if later == index:
                return
            traversed += self.sizes[later]
        self.available.discard(index)
        self.live -= self.costs[index]
        self.num_available -= self.sizes[index]
