"""ZeRO-3's parameter coordinator: which parameters are all-gathered at each module call.

DeepSpeed records the order of module calls in the first step; from then on it prefetches by that order and
keeps parameters that will be reused soon. This module makes the same decisions from the tensors' sizes
(deepspeed/runtime/zero/partitioned_param_coordinator.py).
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
    """Options of ZeRO-3, sizes in elements."""

    persistence: int
    prefetch_bucket: int
    max_live: int
    max_reuse_distance: int
    reduce_bucket: int
    contiguous: bool = True
    """Whether gradients are copied into the bucket until they are reduced (``contiguous_gradients``)."""
    offloads: bool = False
    """Whether partitions are on the host or on NVMe: then even a single rank has to fetch parameters."""
    swaps: Swaps | None = None
    """NVMe swapping options; None without swapping."""
    norm: int = 0
    """See :class:`~shardscope.frameworks.deepspeed.memory.buckets.Cut`."""
    comes_back: bool = False
    """Whether a reduced partition is copied back from the host for its norm."""
    cast: int = 0
    """See :class:`~shardscope.frameworks.deepspeed.memory.buckets.Cut`."""


class Coordinator:
    """All-gathered parameters of one rank, sizes in elements."""

    def __init__(self, route: Route, ranks: int, limits: Thresholds) -> None:
        self.limits, self.ranks = limits, ranks
        self.sizes = route.sizes
        # Each tensor is padded to a multiple of the ranks, all-gathered alone or in a group.
        self.gathers = ranks > 1 or limits.offloads
        """Whether parameters have to be fetched at all: a single rank without offloading has all of them."""
        self.costs = [-(-size // ranks) * ranks if self.gathers else 0 for size in self.sizes]
        self.persists = [size <= limits.persistence for size in self.sizes]
        parts = [-(-size // ranks) for size in self.sizes]
        self.swapper = Swapper(parts, route.trained, self.persists, limits.swaps)
        self._index(route.visits())
        self.available = {index for index, stays in enumerate(self.persists) if stays}
        self.fetched_for = [-1] * len(self.sizes)
        self.step = self.num_available = 0
        self.live = self.rest = sum(self.costs[index] for index in self.available)
        """Elements all-gathered now, with flat buffers and pending fetches; and those never released."""
        self.top = self.live
        """Maximum of ``live`` since a caller last reset it to ``live``."""
        self.flights: dict[int, list[int]] = {}
        self.held: set[int] = set()
        """Frozen parameters that a recomputation has fetched: they are released only after the backward of
        the module in which the recomputation started, the owner (``update_recompute_parameters``)."""
        self.entered: Call | None = None
        self.owner: Call | None = None
        self.viewed: set[int] = set()
        """Tensors that autograd has saved a view of: their memory outlives their release."""
        self.orphans: set[int] = set()
        """Released tensors whose memory is still allocated because of such a view."""

    def _index(self, order: list[Node]) -> None:
        """Record the fetches of each tensor, and the elements used before each fetch."""
        self.queue = deque((step, i) for step, node in enumerate(order) for i in sorted(node.own))
        # For the reuse distance DeepSpeed counts parameters as it releases them: a leaf recursively, other
        # modules without submodules, so that leaves are not counted for other modules.
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
        """Process the event ``kind`` of a module call.

        ``keeps_views``: autograd saves views of its parameters in this forward.
        """
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
        """Release the parameters that a recomputation fetched, when the owner's backward is done."""
        if call is not self.owner:
            return
        held, self.owner, self.held = self.held, None, set()
        for index in held:
            if index in self.available and not self.persists[index]:
                self._drop(index)

    def let_go(self, index: int) -> None:
        """Drop autograd's view of a weight, after the backward of its matmul."""
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
        """Prefetch upcoming partitions from NVMe, up to twice the elements of pending all-gathers."""
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
        """Start one all-gather of the tensors ``chosen``, into a flat buffer if there are several."""
        for index in chosen:
            self.swapper.read(index)
            self.flights[index] = chosen
            self.num_available += self.sizes[index]
            self.live += self.costs[index]
        self.top = max(self.top, self.live)

    def _arrive(self, index: int) -> None:
        """Wait for a tensor's all-gather.

        A coalesced all-gather is copied out of its flat buffer, which is freed when its last tensor is used.
        """
        flight = self.flights.pop(index)
        together = len(flight) > 1 and self.ranks > 1
        if index not in self.available:
            self.available.update(flight)
            self.live += sum(self.costs[member] for member in flight) if together else 0
            self.top = max(self.top, self.live)
        if together and all(self.flights.get(member) is not flight for member in flight):
            self.live -= sum(self.costs[member] for member in flight)

    def next_use(self, index: int, told: list[deque[int]] | None = None) -> int | None:
        """Return the next fetch that uses the tensor; None if there is none in this step."""
        uses = (told or self.uses)[index]
        while uses and uses[0] < self.step:
            uses.popleft()
        return uses[0] if uses else None

    def release(self, index: int, is_leaf: bool) -> None:
        """Release a tensor after a module call, unless it persists or is reused within the distance."""
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
