"""What stage 3 has gathered, module by module (deepspeed/runtime/zero/partitioned_param_coordinator.py).

DeepSpeed records in the first step in which order modules come, and from then on prefetches by it and keeps
what will soon be used again. The same decisions are taken here over the tensors' sizes.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.frameworks.deepspeed.buckets import Instant, Part
from shardscope.frameworks.deepspeed.calls import NOTHING, Call, layer_calls
from shardscope.frameworks.deepspeed.swapping import NORM_ELEMENTS, SwapFailure, Swapper, Swaps
from shardscope.frameworks.deepspeed.visits import Event, Node, backward_of, forward_of, with_recomputation

if TYPE_CHECKING:
    from shardscope.architecture import Architecture
    from shardscope.recipe import Recipe

_TIED = -1
"""Stands for the embedding's tensor."""


class Thresholds(NamedTuple):
    """Options of stage 3, in elements."""

    persistence: int
    prefetch_bucket: int
    max_live: int
    max_reuse_distance: int
    reduce_bucket: int
    offloads: bool = False
    """Whether parts are on the host or on NVMe: then one rank alone gathers too, from there."""
    swaps: Swaps | None = None
    """What is on NVMe, if anything is."""
    norm: int = 0
    """As of :class:`~shardscope.frameworks.deepspeed.buckets.Cut`."""
    comes_back: bool = False
    """Whether a reduced part comes back from the host for its norm."""


class Gathered(NamedTuple):
    """Elements gathered or on their way, whole gradients and reduction copies included."""

    rest: int
    """Parameters that are never cut."""
    forward: int
    """When forward ends."""
    backward: tuple[Part, ...]
    """Parts of backward; the last one is the reduction that ends it."""
    in_forward: tuple[tuple[int, int], ...]
    """Layers that forward has passed, and the most that it holds there; where more comes later, not told."""
    failure: SwapFailure | None = None
    """What DeepSpeed asserts in this step."""


class Modules(NamedTuple):
    """Whose modules run, and the sizes of those outside of decoder layers."""

    architecture: Architecture
    adapted: Recipe | None
    dense_layers: int
    moe_layers: int
    before: tuple[int, ...]
    """Embeddings."""
    norm: tuple[int, ...]
    head: tuple[int, ...]
    """Empty: the embedding is the head too."""


@lru_cache(maxsize=1024)
def gathered(modules: Modules, ranks: int, interval: int, limits: Thresholds) -> Gathered:
    """Follow one step over ``modules``.

    One rank alone has everything. Of layers every ``interval``-th, the first included, runs its forward again
    in its backward; 0: none does.
    """
    return _Coordinator(modules, ranks, interval, limits).run()


class _Coordinator:
    def __init__(self, modules: Modules, ranks: int, interval: int, limits: Thresholds) -> None:
        self.limits, self.interval, self.ranks = limits, interval, ranks
        self.sizes: list[int] = []
        self.tied = 0 if modules.head else modules.before[0]
        self.trains_all = modules.adapted is None
        self.forward, self.backward = self._events(*self._nodes(modules))
        # Gathered alone or together, each tensor's parts are of one size.
        gathers = ranks > 1 or limits.offloads
        self.costs = [-(-size // ranks) * ranks if gathers else 0 for size in self.sizes]
        self.persists = [size <= limits.persistence for size in self.sizes]
        parts = [-(-size // ranks) for size in self.sizes]
        self.swapper = Swapper(parts, self._trained(), self.persists, limits.swaps)
        self._index()
        self.available = {index for index, stays in enumerate(self.persists) if stays}
        self.fetched_for = [-1] * len(self.sizes)
        self.step = self.num_available = 0
        self.live = self.rest = sum(self.costs[index] for index in self.available)
        self.top = self.live
        self.flights: dict[int, list[int]] = {}
        self.held: set[int] = set()
        """Frozen weights that a recomputation has gathered: nobody releases them but its owner, the module
        whose backward it began in (``update_recompute_parameters``)."""
        self.owner: Call | None = None
        self.viewed: set[int] = set()
        self.orphans: set[int] = set()
        self.fill = self.num_filled = self.oversized = self.largest = 0

    # ---- the order of events

    def _nodes(self, modules: Modules) -> tuple[list[Node], ...]:
        """Modules around everything, those before the layers, the layers, and those behind."""
        adapted, trained = modules.adapted, modules.adapted is None
        kinds = [False] * modules.dense_layers + [True] * modules.moe_layers
        layers = [
            layer_calls(modules.architecture, adapted, moe, not place) for place, moe in enumerate(kinds)
        ]
        before = [Call((size,), (), trained, goes_back=trained) for size in modules.before]
        before.append(NOTHING._replace(goes_back=False))
        behind = [Call(modules.norm, (), trained), Call(modules.head or (_TIED,), (), trained)]
        wrappers = [NOTHING] * (2 if trained else 4)
        groups = [wrappers, before, layers, behind]
        outer, *others = ([self._numbered(call) for call in group] for group in groups)
        head = others[-1][-1].own
        every = tuple(range(len(self.sizes)))
        inner = tuple(index for index in every if index not in head or not index)
        return [
            *(node._replace(inside=every) for node in outer[:-1]),
            outer[-1]._replace(inside=inner),
        ], *others

    def _numbered(self, call: Call) -> Node:
        own = []
        for size in call.own:
            # The embedding's tensor is the first of all.
            own.append(0 if size == _TIED else len(self.sizes))
            if size != _TIED:
                self.sizes.append(size)
        calls = tuple(self._numbered(inner) for inner in call.calls)
        return Node(
            tuple(own), calls, call, (*own, *(i for inner in calls for i in inner.inside or inner.own))
        )

    def _events(
        self, wrappers: list[Node], before: list[Node], layers: list[Node], behind: list[Node]
    ) -> tuple[list[list[Event]], list[list[Event]]]:
        """Of forward and of backward, part by part: its ends and each layer."""
        norm, head = behind
        begin: list[Event] = [("fetch", node) for node in wrappers]
        begin += [event for node in before for event in forward_of(node)]
        forward = [begin, *(list(forward_of(layer)) for layer in layers)]
        forward.append([event for node in behind for event in forward_of(node)])
        # The last wrapper is the model without its head.
        first: list[Event] = [("fetch", node) for node in wrappers[:-1]]
        first += [*backward_of(head), ("fetch", wrappers[-1]), *backward_of(norm)]
        backward = [first]
        for place, layer in reversed(list(enumerate(layers))):
            events = list(backward_of(layer))
            backward.append(with_recomputation(layer, events) if self._recomputes(place) else events)
        # Nothing tells that an embedding's gradient is through: it stays until backward has ended.
        last = [event for node in reversed(before) for event in backward_of(node) if event[0] != "release"]
        return forward, [*backward, last]

    def _recomputes(self, layer: int) -> bool:
        return self.interval > 0 and layer % self.interval == 0

    def _trained(self) -> list[bool]:
        found = [self.trains_all] * len(self.sizes)
        for part in self.backward:
            for _, node in part:
                for index in node.own:
                    found[index] = node.call.trained
        return found

    def _index(self) -> None:
        """In which fetch each tensor comes, and how many elements came before each fetch."""
        order = [
            node
            for part in (*self.forward, *self.backward)
            for kind, node in part
            if kind in ("fetch", "again")
        ]
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

    # ---- a step

    def run(self) -> Gathered:
        """The moments of :class:`Gathered`."""
        in_forward: list[tuple[int, int]] = []
        num_layers = len(self.forward) - 2
        for place, events in enumerate(self.forward):
            last = max((at for at, (kind, node) in enumerate(events) if kind == "fetch" and node.own))
            self.top, before = self.live, 0
            for at, (kind, node) in enumerate(events):
                if at == last:
                    # In front of a layer's last product all is saved that it saves.
                    before, self.top = self.top, self.live
                self._do(kind, node, keeps_views=not self._recomputes(place - 1))
            in_forward.append((max(0, min(place - 1, num_layers)), max(before, self.top)))
            in_forward.append((min(place, num_layers), self.top))
        forward = self.live
        found = [self._part(events, place) for place, events in enumerate(self.backward)]
        # The last reduction starts from the hook of the last gradient.
        rest = self.live + self.oversized
        copied = self._copied() if self.trains_all else 0
        rest += self._leaving()
        end = Instant(rest + copied, self.swapper.kept)
        return Gathered(
            self.rest, forward, (*found, Part(end, end)), _falling(in_forward), self.swapper.failure
        )

    def _part(self, events: list[Event], place: int) -> Part:
        """One part of backward."""
        # The head's gradient waits until the embedding has its own.
        waits = self.tied if place and self.trains_all else 0
        inner: list[Instant] = []
        base: Instant | None = None
        middle: Instant | None = None
        peak = behind = Instant(0, 0)
        # Between the feed-forward and attention, whose first gradient is the last that counts.
        between = False
        entered: Call | None = None
        for kind, node in events:
            self.top = self.live
            if kind == "fetch":
                entered = node.call
            elif kind == "again" and self.owner is None:
                self.owner = entered
            if kind != "gradients":
                self._do(kind, node, keeps_views=kind == "again")
                peak = self._more(peak, self.top + self.oversized + waits)
                continue
            if base is None or not place:
                more = waits if place else self._head_waits(node)
                base = Instant(self.live + self.oversized + more, self.swapper.kept)
            if node.call.is_leaf:
                most, reduced = self._leaf(node, inner)
                peak = self._more(peak, waits + most)
                behind, between = self._more(behind, waits + reduced), True
                continue
            if node.call.in_attention and middle is None:
                middle = Instant(self.live + self.oversized + waits, self.swapper.kept)
            for index in node.own:
                now = self._gradient(index, node.call.trained) + waits
                peak = self._more(peak, now)
                if node.call.feeds_forward:
                    inner.append(Instant(now, self.swapper.kept))
                elif between:
                    behind = self._more(behind, now)
            between = node.call.feeds_forward or (between and not node.call.in_attention)
        if base is None:
            base = Instant(self.live + self.oversized + waits, self.swapper.kept)
        return Part(base, peak, middle, tuple(inner), behind)

    def _more(self, peak: Instant, staging: int) -> Instant:
        """The fuller one of an earlier instant and of now."""
        now = Instant(staging, self.swapper.kept)
        return now if now.total > peak.total else peak

    def _leaf(self, node: Node, inner: list[Instant]) -> tuple[int, int]:
        """The most while a leaf goes backward, and while its gradients are reduced one by one; then it is
        released."""
        trained = node.call.trained
        waiting = sum(self.sizes[index] for index in node.own) if trained else 0
        behind = node.call.viewed[-1] + 1
        # Experts go backward first, the last of their products first of all; then shared ones.
        shared = sum(self.sizes[index] for index in node.own[behind:]) if trained else 0
        self._let_go(node.own[behind - 1])
        peak = self.live + self.oversized + waiting - shared
        inner.append(Instant(peak, self.swapper.kept))
        self._let_go(node.own[behind - 2])
        peak = max(peak, self.live + self.oversized + waiting)
        reduced = 0
        for index in node.own if waiting else ():
            held = self.live + self.oversized + waiting
            reduced = max(reduced, held + self._reduce(index))
            waiting -= self.sizes[index]
        for index in node.own:
            self._release(index, is_leaf=True)
        self._let_all_go(node.call)
        return max(peak, reduced), reduced

    def _let_all_go(self, call: Call) -> None:
        """Backward is through with a module: what was gathered again in it goes, wanted soon or not."""
        if call is not self.owner:
            return
        held, self.owner, self.held = self.held, None, set()
        for index in held:
            if index in self.available and not self.persists[index]:
                self._drop(index)

    def _head_waits(self, node: Node) -> int:
        """The gradient of a head that is the embedding too, once it is made."""
        return 0 if 0 in node.own or not self.trains_all else self.tied

    def _do(self, kind: str, node: Node, keeps_views: bool) -> None:
        if kind == "release":
            for index in node.own:
                self._release(index, node.call.is_leaf)
            self._let_all_go(node.call)
            return
        self._fetch(node.own)
        if kind == "again" and not node.call.trained:
            self.held.update(node.own)
        if keeps_views and node.call.goes_back and (self.ranks > 1 or self.limits.offloads):
            self.viewed.update(node.own[place] for place in node.call.viewed)

    def _gradient(self, index: int, trained: bool) -> int:
        """Elements held while a tensor's gradient is made and put into the bucket, without that itself."""
        size, held = self.sizes[index], self.live + self.oversized
        is_last = trained and self._next_use(index) is None
        most = held + size if trained else held
        if is_last:
            copied = self._reduce(index)
            # The first of a tied embedding's gradients waits, which is counted by who asks; then there are
            # both and their sum, and that alone is reduced.
            both = self.tied if not index else 0
            most += max(both, copied - both)
        self._let_go(index)
        return most

    def _let_go(self, index: int) -> None:
        """A product has gone backward, and with it autograd's view of its weight."""
        self.viewed.discard(index)
        if index in self.orphans:
            self.orphans.discard(index)
            self.live -= self.costs[index]

    def _reduce(self, index: int) -> int:
        """A gradient goes into the bucket; what reducing a full one copies."""
        bucket, size, copy = self.limits.reduce_bucket, self.sizes[index], 0
        if self.fill and self.fill + size > bucket:
            copy = self._copied() + self._leaving()
            self.fill = self.num_filled = self.oversized = 0
        self.fill += size
        self.num_filled += 1
        self.swapper.wait(index)
        self.largest = max(self.largest, -(-size // self.ranks))
        if size > bucket:
            self.oversized = size
        return copy

    def _leaving(self) -> int:
        """Reduced parts go to the host or to files. Of those for the host each has its norm taken in double
        precision, so many numbers at a time (``_constant_buffered_norm2``, deepspeed/runtime/zero/stage3.py).
        """
        part, self.largest = self.largest, 0
        norm = self.limits.norm * min(part, NORM_ELEMENTS)
        return self.limits.comes_back * part + norm + self.swapper.reduce()

    def _copied(self) -> int:
        """The interleaved copy of gradients that are reduced together; one that divides evenly has none."""
        alone = self.num_filled == 1 and not self.fill % self.ranks
        return 0 if alone else self.fill

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

    def _next_use(self, index: int, told: list[deque[int]] | None = None) -> int | None:
        """The next fetch of which a tensor is part."""
        uses = (told or self.uses)[index]
        while uses and uses[0] < self.step:
            uses.popleft()
        return uses[0] if uses else None

    def _release(self, index: int, is_leaf: bool) -> None:
        if self.persists[index] or self.fetched_for[index] > self.step or index not in self.available:
            return
        if index in self.held and self.owner is not None:
            return
        later = self._next_use(index, self.uses_inside if is_leaf else self.uses)
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


def _falling(tops: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """(layers passed, elements) of those that hold more than every later one."""
    found: list[tuple[int, int]] = []
    for passed, top in reversed(tops):
        if not found or top > found[-1][1]:
            found.append((passed, top))
    return tuple(found)
