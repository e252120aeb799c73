"""Module calls of one step in ZeRO-3's order, with the tensors that each of them needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.frameworks.deepspeed.memory.calls import NOTHING, Call, layer_calls
from shardscope.frameworks.deepspeed.memory.visits import (
    Event,
    Node,
    backward_of,
    forward_of,
    with_recomputation,
)

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.recipe import Recipe

_TIED = -1
"""Placeholder size of a tied head, which is the embedding's tensor."""


class Modules(NamedTuple):
    """Model whose modules run, with the tensor sizes outside of decoder layers, in elements."""

    architecture: Architecture
    adapted: Recipe | None
    dense_layers: int
    moe_layers: int
    before: tuple[int, ...]
    """Embedding tensors."""
    norm: tuple[int, ...]
    head: tuple[int, ...]
    """Head tensors; empty if the head is tied to the embedding."""


class Route:
    """Module calls of a step, with numbered tensors.

    Every ``interval``-th layer, starting with the first, is recomputed in backward; 0 recomputes none.
    """

    def __init__(self, modules: Modules, interval: int) -> None:
        self.interval = interval
        self.sizes: list[int] = []
        """Elements of each tensor, by number."""
        self.tied = 0 if modules.head else modules.before[0]
        """Elements of an embedding that is tied to the head; 0 if untied."""
        self.trains_all = modules.adapted is None
        self.forward, self.backward = self._events(*self._nodes(modules))
        """Events in parts: one for each end of the model and one for each layer."""
        self.trained = self._trained()

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.forward) - 2

    def visits(self) -> list[Node]:
        """Return the module of every fetch of the step, in order."""
        parts = (*self.forward, *self.backward)
        return [node for part in parts for kind, node in part if kind in ("fetch", "again")]

    def _nodes(self, modules: Modules) -> tuple[list[Node], ...]:
        """Return the wrapper modules, the modules before the layers, the layers and those after them."""
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
            # The embedding's tensor is number 0.
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
        """Return the events of forward and of backward, in one part per layer and one per end."""
        norm, head = behind
        begin: list[Event] = [("fetch", node) for node in wrappers]
        begin += [event for node in before for event in forward_of(node)]
        forward = [begin, *(list(forward_of(layer)) for layer in layers)]
        forward.append([event for node in behind for event in forward_of(node)])
        # The last wrapper is the base model, without the head.
        first: list[Event] = [("fetch", node) for node in wrappers[:-1]]
        first += [*backward_of(head), ("fetch", wrappers[-1]), *backward_of(norm)]
        backward = [first]
        for place, layer in reversed(list(enumerate(layers))):
            events = list(backward_of(layer))
            backward.append(with_recomputation(layer, events) if self.recomputes(place) else events)
        # No backward hook fires for the embedding: its parameters stay all-gathered until backward has ended.
        last = [event for node in reversed(before) for event in backward_of(node) if event[0] != "release"]
        return forward, [*backward, last]

    def recomputes(self, layer: int) -> bool:
        """Return whether ``layer`` is recomputed in backward."""
        return self.interval > 0 and layer % self.interval == 0

    def _trained(self) -> list[bool]:
        found = [self.trains_all] * len(self.sizes)
        for part in self.backward:
            for _, node in part:
                for index in node.own:
                    found[index] = node.call.trained
        return found
