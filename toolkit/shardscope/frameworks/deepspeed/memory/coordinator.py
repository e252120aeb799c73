"""What stage 3 has gathered, visit by visit (deepspeed/runtime/zero/partitioned_param_coordinator.py).

DeepSpeed records in the first step in which order modules come, and from then on prefetches by it and keeps
what will soon be used again. The same decisions are taken here over the tensors' sizes.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from shardscope.frameworks.deepspeed.memory.swapping import Swapper, Swaps

if TYPE_CHECKING:
    from shardscope.frameworks.deepspeed.memory.calls import Call
    from shardscope.frameworks.deepspeed.memory.route import Route
    from shardscope.frameworks.deepspeed.memory.visits import Node


class Thresholds(NamedTuple):
    """Options of stage 3, in elements."""

    persistence: int
    prefetch_bucket: int
    max_live: int
    max_reuse_distance: int
    reduce_bucket: int
    contiguous: bool = True
    """Whether gradients wait in the bucket; else each waits where it was made."""
    offloads: bool = False
    """Whether parts are on the host or on NVMe: then one rank alone gathers too, from there."""
    swaps: Swaps | None = None
    """What is on NVMe, if anything is."""
    norm: int = 0
    """As of :class:`~shardscope.frameworks.deepspeed.memory.buckets.Cut`."""
    comes_back: bool = False
    """Whether a reduced part comes back from the host for its norm."""
    cast: int = 0
    """As of the same."""


class Coordinator:
    """The gathered tensors of one rank. All numbers are elements."""

    def __init__(self, route: Route, ranks: int, limits: Thresholds) -> None:
        self.limits, self.ranks = limits, ranks
        self.sizes = route.sizes
        # Gathered alone or together, each tensor's parts are of one size.
        self.gathers = ranks > 1 or limits.offloads
        """Whether this rank has to gather at all: alone it has everything."""
        self.costs = [-(-size // ranks) * ranks if self.gathers else 0 for size in self.sizes]
        self.persists = [size <= limits.persistence for size in self.sizes]
        parts = [-(-size // ranks) for size in self.sizes]
        self.swapper = Swapper(parts, route.trained, self.persists, limits.swaps)
        self._index(route.visits())
        self.available = {index for index, stays in enumerate(self.persists) if stays}
        self.fetched_for = [-1] * len(self.sizes)
        self.step = self.num_available = 0
        self.live = self.rest = sum(self.costs[index] for index in self.available)
        """Gathered now, copies and what is on its way included; and what is never released."""
        self.top = self.live
        """The most that there was since somebody set it to ``live``."""
        self.flights: dict[int, list[int]] = {}
        self.held: set[int] = set()
        """Frozen weights that a recomputation has gathered: nobody releases them but its owner, the module
        whose backward it began in (``update_recompute_parameters``)."""
        self.entered: Call | None = None
        self.owner: Call | None = None
        self.viewed: set[int] = set()
        """Tensors of which autograd has a view: released, they stay as long."""
        self.orphans: set[int] = set()
        """Released ones that are still there for such a view."""

    def _index(self, order: list[Node]) -> None:
        """In which fetch each tensor comes, and how many elements came before each fetch."""
        self.queue = deque((step, i) for step, node in enumerate(order) for i in sorted(node.own))
        # DeepSpeed looks into what comes next as it looks into what it releases: a leaf with all inside,
        # other modules without, so that no leaf counts for them.
        self.passed, self.passed_inside = [0], [0]
        self.uses: list[deque[int]] = [deque() for _ in self.sizes]
        self.uses_inside: list[deque[int]] = [deque() for _ in self.sizes]
        for step, node in enumerate(order):
            inside = node.inside if node.inside else node.own
            for index in node.own:
                self.uses[index].append(step)
            own = 0 if node.call.is_leaf else sum(self.sizes[index] for index in node.own)
            self.passed.append(self.passed[-1] + own)
            self.passed_inside.append(self.passed_inside[-1] + sum(self.sizes[index] for index in inside))
            for index in inside:
                self.uses_inside[index].append(step)

    def visit(self, kind: str, node: Node, keeps_views: bool) -> None:
        """A module is entered or left; ``keeps_views``: autograd saves what its forward needs."""
        if kind == "release":
            for index in node.own:
                self.release(index, node.call.is_leaf)
            self.let_all_go(node.call)
            return
        if kind == "fetch":
            self.entered = node.call
        elif self.owner is None:
            self.owner = self.entered
        self._fetch(node.own)
        if kind == "again" and not node.call.trained:
            self.held.update(node.own)
        if keeps_views and node.call.goes_back and self.gathers:
            self.viewed.update(node.own[place] for place in node.call.viewed)

    def let_all_go(self, call: Call) -> None:
        """Backward is through with a module: what was gathered again in it goes, wanted soon or not."""
        if call is not self.owner:
            return
        held, self.owner, self.held = self.held, None, set()
        for index in held:
            if index in self.available and not self.persists[index]:
                self._drop(index)

    def let_go(self, index: int) -> None:
        """A product has gone backward, and with it autograd's view of its weight."""
        self.viewed.discard(index)
        if index in self.orphans:
            self.orphans.discard(index)
            self.live -= self.costs[index]

    def _fetch(self, own: tuple[int, ...]) -> None:
        missing = [index for index in own if index not in self.available and index not in self.flights]
        if missing:
            self._launch(missing)
        for index in own:
            if index in self.flights:
                self._arrive(index)
        recent = sum(self.fetched_for[index] < self.step for index in own)
        for _ in range(min(recent, len(self.queue))):
            place, popped = self.queue.popleft()
            self.fetched_for[popped] = place
        self._prefetch()
        self.step += 1

    def _prefetch(self) -> None:
        room = min(self.limits.max_live - self.num_available, self.limits.prefetch_bucket)
        chosen: list[int] = []
        elements = 0
        while self.queue and elements < room:
            if self.swapper.is_away(self.queue[0][1]):
                break
            place, index = self.queue.popleft()
            self.fetched_for[index] = max(self.fetched_for[index], place)
            if index in self.available or index in self.flights or index in chosen:
                continue
            chosen.append(index)
            elements += self.sizes[index]
        if chosen:
            self._launch(chosen)
        if self.limits.prefetch_bucket:
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Parts on NVMe whose tensors come next, twice as much as is being gathered."""
        swapper = self.swapper
        if not swapper.away:
            return
        enough = 2 * sum(self.sizes[index] for index in self.flights)
        considered = 0
        chosen: list[int] = []
        for _, index in self.queue:
            if considered > enough or len(chosen) >= swapper.free:
                break
            if swapper.is_away(index):
                chosen.append(index)
            considered += self.sizes[index]
        swapper.read_ahead(chosen)

    def _launch(self, chosen: list[int]) -> None:
        """Gather into one flat buffer; a single tensor's is its own."""
        for index in chosen:
            self.swapper.read(index)
            self.flights[index] = chosen
            self.num_available += self.sizes[index]
            self.live += self.costs[index]
        self.top = max(self.top, self.live)

    def _arrive(self, index: int) -> None:
        """A coalesced gather is copied out of its flat buffer, which stays until its last tensor is used."""
        flight = self.flights.pop(index)
        together = len(flight) > 1 and self.ranks > 1
        if index not in self.available:
            self.available.update(flight)
            self.live += sum(self.costs[member] for member in flight) if together else 0
            self.top = max(self.top, self.live)
        if together and all(self.flights.get(member) is not flight for member in flight):
            self.live -= sum(self.costs[member] for member in flight)

    def next_use(self, index: int, told: list[deque[int]] | None = None) -> int | None:
        """The next fetch of which a tensor is part."""
        uses = (told or self.uses)[index]
        while uses and uses[0] < self.step:
            uses.popleft()
        return uses[0] if uses else None

    def release(self, index: int, is_leaf: bool) -> None:
        """A module is through with a tensor, which goes unless it is wanted again soon."""
        if self.persists[index] or self.fetched_for[index] > self.step or index not in self.available:
            return
        if index in self.held and self.owner is not None:
            return
        later = self.next_use(index, self.uses_inside if is_leaf else self.uses)
        passed = self.passed_inside if is_leaf else self.passed
        if later is not None and passed[later] - passed[self.step] < self.limits.max_reuse_distance:
            return
        self._drop(index)

    def _drop(self, index: int) -> None:
        self.available.discard(index)
        self.swapper.give_back(index)
        self.num_available -= self.sizes[index]
        if index in self.viewed:
            self.viewed.discard(index)
            self.orphans.add(index)
        else:
            self.live -= self.costs[index]
