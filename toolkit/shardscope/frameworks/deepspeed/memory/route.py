"""One step over a model's modules, as ZeRO-3 meets them: which tensors each visit needs, forward and back."""

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
"""Stands for the embedding's tensor."""


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


class Route:
    """All visits of a step, and the tensors by their numbers.

    Of layers every ``interval``-th, the first included, runs its forward again in its backward; 0: none does.
    """

    def __init__(self, modules: Modules, interval: int) -> None:
        self.interval = interval
        self.sizes: list[int] = []
        """Elements of each tensor."""
        self.tied = 0 if modules.head else modules.before[0]
        """Elements of an embedding that is the head too."""
        self.trains_all = modules.adapted is None
        self.forward, self.backward = self._events(*self._nodes(modules))
        """Part by part: its ends and each layer."""
        self.trained = self._trained()

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.forward) - 2

    def visits(self) -> list[Node]:
        """Every fetch of the step, in its order."""
        parts = (*self.forward, *self.backward)
        return [node for part in parts for kind, node in part if kind in ("fetch", "again")]

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
            backward.append(with_recomputation(layer, events) if self.recomputes(place) else events)
        # Nothing tells that an embedding's gradient is through: it stays until backward has ended.
        last = [event for node in reversed(before) for event in backward_of(node) if event[0] != "release"]
        return forward, [*backward, last]

    def recomputes(self, layer: int) -> bool:
        """Whether a layer's forward runs again in backward."""
        return self.interval > 0 and layer % self.interval == 0

    def _trained(self) -> list[bool]:
        found = [self.trains_all] * len(self.sizes)
        for part in self.backward:
            for _, node in part:
                for index in node.own:
                    found[index] = node.call.trained
        return found
