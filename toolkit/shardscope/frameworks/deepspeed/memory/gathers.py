"""ZeRO-3's all-gathers and gradient reductions through one step, with their maxima in each part of backward.

The coordinator (``coordinator.py``) decides which parameters are all-gathered when. Gradients are copied to a
bucket, and reduced when it is full (deepspeed/runtime/zero/stage3.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.frameworks.deepspeed.memory.buckets import Instant, Part
from shardscope.frameworks.deepspeed.memory.coordinator import Coordinator, Thresholds
from shardscope.frameworks.deepspeed.memory.route import Modules, Route
from shardscope.frameworks.deepspeed.memory.swapping import NORM_ELEMENTS, SwapFailure

if TYPE_CHECKING:
    from shardscope.frameworks.deepspeed.memory.visits import Event, Node


class Gathered(NamedTuple):
    """Elements of all-gathered parameters, unsharded gradients and reduction copies in one step."""

    rest: int
    """Persistent parameters, which are never released."""
    forward: int
    """Elements at the end of forward."""
    backward: tuple[Part, ...]
    """Parts of backward; the last one is the final reduction."""
    in_forward: tuple[tuple[int, int], ...]
    """(layers passed, maximum elements) in forward; entries below a later maximum are left out."""
    failure: SwapFailure | None = None
    """Assertion that DeepSpeed fails in this step; None if there is none."""


@lru_cache(maxsize=1024)
def gathered(modules: Modules, ranks: int, interval: int, limits: Thresholds) -> Gathered:
    """Simulate one step over ``modules`` on one of ``ranks``.

    Every ``interval``-th layer, starting with the first, is recomputed in backward; 0 recomputes none.
    """
    return _Step(Route(modules, interval), ranks, limits).run()


class _Step:
    def __init__(self, route: Route, ranks: int, limits: Thresholds) -> None:
        self.route, self.ranks, self.limits = route, ranks, limits
        self.sizes, self.tied, self.trains_all = route.sizes, route.tied, route.trains_all
        self.weights = Coordinator(route, ranks, limits)
        self.swapper = self.weights.swapper
        self.fill = self.num_filled = self.oversized = self.largest = 0

    def run(self) -> Gathered:
        """Simulate the step and return its phases."""
        in_forward: list[tuple[int, int]] = []
        num_layers = self.route.num_layers
        for place, events in enumerate(self.route.forward):
            last = max((at for at, (kind, node) in enumerate(events) if kind == "fetch" and node.own))
            self.weights.top, before = self.weights.live, 0
            for at, (kind, node) in enumerate(events):
                if at == last:
                    # Before a layer's last matmul all of its saved tensors exist.
                    before, self.weights.top = self.weights.top, self.weights.live
                self.weights.visit(kind, node, keeps_views=not self.route.recomputes(place - 1))
            in_forward.append((max(0, min(place - 1, num_layers)), max(before, self.weights.top)))
            in_forward.append((min(place, num_layers), self.weights.top))
        forward = self.weights.live
        found = [self._part(events, place) for place, events in enumerate(self.route.backward)]
        # The final reduction starts in the hook of the last gradient.
        rest = self.weights.live + self.oversized
        reduced = self._reduced() if self.trains_all else self._leaving()
        end = Instant(rest + reduced, self.swapper.kept)
        return Gathered(
            self.weights.rest, forward, (*found, Part(end, end)), _falling(in_forward), self.swapper.failure
        )

    def _part(self, events: list[Event], place: int) -> Part:
        """Simulate one part of backward: head and norm, one layer, or the embedding."""
        # A tied head's gradient stays allocated until the embedding has its own.
        waits = self.tied if place and self.trains_all else 0
        inner: list[Instant] = []
        base: Instant | None = None
        middle: Instant | None = None
        peak = behind = Instant(0, 0)
        # Whether the feed-forward is done; attention's first gradient ends this phase.
        between = False
        for kind, node in events:
            self.weights.top = self.weights.live
            if kind != "gradients":
                self.weights.visit(kind, node, keeps_views=kind == "again")
                peak = self._more(peak, self.weights.top + self.oversized + waits)
                continue
            if base is None or not place:
                more = waits if place else self._head_waits(node)
                base = Instant(self.weights.live + self.oversized + more, self.swapper.kept)
            if node.call.is_leaf:
                most, reduced = self._leaf(node, inner)
                peak = self._more(peak, waits + most)
                behind, between = self._more(behind, waits + reduced), True
                continue
            if node.call.in_attention and middle is None:
                middle = Instant(self.weights.live + self.oversized + waits, self.swapper.kept)
            for index in node.own:
                now = self._gradient(index, node.call.trained) + waits
                peak = self._more(peak, now)
                if node.call.feeds_forward:
                    inner.append(Instant(now, self.swapper.kept))
                elif between:
                    behind = self._more(behind, now)
            between = node.call.feeds_forward or (between and not node.call.in_attention)
        if base is None:
            base = Instant(self.weights.live + self.oversized + waits, self.swapper.kept)
        return Part(base, peak, middle, tuple(inner), behind)

    def _more(self, peak: Instant, staging: int) -> Instant:
        """Return the larger one of ``peak`` and the current state with ``staging`` elements."""
        now = Instant(staging, self.swapper.kept)
        return now if now.total > peak.total else peak

    def _leaf(self, node: Node, inner: list[Instant]) -> tuple[int, int]:
        """Return the maxima of a leaf's backward and of reducing its gradients one by one; release it."""
        trained = node.call.trained
        waiting = sum(self.sizes[index] for index in node.own) if trained else 0
        behind = node.call.viewed[-1] + 1
        # The routed experts' backward comes first, starting at their last matmul, then shared experts'.
        shared = sum(self.sizes[index] for index in node.own[behind:]) if trained else 0
        self.weights.let_go(node.own[behind - 1])
        peak = self.weights.live + self.oversized + waiting - shared
        inner.append(Instant(peak, self.swapper.kept))
        self.weights.let_go(node.own[behind - 2])
        peak = max(peak, self.weights.live + self.oversized + waiting)
        reduced = 0
        for index in node.own if waiting else ():
            held = self.weights.live + self.oversized + waiting
            reduced = max(reduced, held + self._reduce(index))
            waiting -= self.sizes[index]
        for index in node.own:
            self.weights.release(index, is_leaf=True)
        self.weights.let_all_go(node.call)
        return max(peak, reduced), reduced

    def _head_waits(self, node: Node) -> int:
        """Return the elements of a tied head's gradient after the head's backward."""
        return 0 if 0 in node.own or not self.trains_all else self.tied

    def _gradient(self, index: int, trained: bool) -> int:
        """Return the most elements, besides the bucket, while a gradient is computed and copied into it."""
        size, held = self.sizes[index], self.weights.live + self.oversized
        is_last = trained and self.weights.next_use(index) is None
        most = held + size if trained else held
        if is_last:
            copied = self._reduce(index)
            # The caller counts the first of a tied embedding's two gradients. Here both and their sum are
            # alive, and only the sum is reduced.
            both = self.tied if not index else 0
            most += max(both, copied - both)
        self.weights.let_go(index)
        return most

    def _reduce(self, index: int) -> int:
        """Add a gradient to the bucket. Returns the elements copied if a full bucket was reduced first."""
        bucket, size, copy = self.limits.reduce_bucket, self.sizes[index], 0
        if self.fill and self.fill + size > bucket:
            copy = self._reduced()
            self.fill = self.num_filled = self.oversized = 0
        self.fill += size
        self.num_filled += 1
        self.swapper.wait(index)
        self.largest = max(self.largest, -(-size // self.ranks))
        if size > bucket:
            self.oversized = size
        elif not self.limits.contiguous:
            self.oversized = self.fill
        return copy

    def _leaving(self) -> int:
        """Return the temporary elements while reduced partitions are copied to the host or to files.

        The norm of each partition for the host is computed in double precision, ``NORM_ELEMENTS`` at a time
        (``_constant_buffered_norm2``, deepspeed/runtime/zero/stage3.py).
        """
        part, self.largest = self.largest, 0
        norm = self.limits.norm * min(part, NORM_ELEMENTS)
        return self.limits.comes_back * part + norm + self.swapper.reduce()

    def _reduced(self) -> int:
        """Return the elements copied to reduce the bucket.

        Several gradients are copied into an interleaved buffer; a single one that divides evenly is not. With
        ``communication_data_type`` the bucket and this copy have that type, and a gradient too large for the
        bucket is cast separately. The reduced partitions are cast back before the copy is freed
        (``__avg_scatter_grads``, deepspeed/runtime/zero/stage3.py).
        """
        alone = self.num_filled == 1 and not self.fill % self.ranks
        leaving, cast = self._leaving(), self.limits.cast
        if not cast:
            return leaving if alone else self.fill + leaving
        parts = -(-self.fill // self.ranks)
        beside = (not alone) + (self.oversized > 0)
        return parts + max(cast * beside * self.fill, leaving)


def _falling(tops: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the (layers passed, elements) entries that are larger than every later one, last to first."""
    found: list[tuple[int, int]] = []
    for passed, top in reversed(tops):
        if not found or top > found[-1][1]:
            found.append((passed, top))
    return tuple(found)
