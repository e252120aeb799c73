"""Events of ZeRO-3's module hooks in forward and backward, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from shardscope.frameworks.deepspeed.memory.calls import Call


class Node(NamedTuple):
    """Module call with its tensors numbered."""

    own: tuple[int, ...]
    calls: tuple[Node, ...]
    call: Call
    inside: tuple[int, ...] = ()
    """Tensors of the module and all its submodules; empty if these are just ``own``."""


Event = tuple[Literal["fetch", "again", "gradients", "release"], Node]


def forward_of(node: Node) -> Iterator[Event]:
    """Yield the forward events of a module and its submodules, in order."""
    yield "fetch", node
    for inner in node.calls:
        yield from forward_of(inner)
    if node.own:
        yield "release", node


def backward_of(node: Node) -> Iterator[Event]:
    """Yield the backward events, in reverse order; a module with several matmuls starts with the last."""
    if not node.call.goes_back:
        return
    yield "fetch", node
    late = node.own[:1] if node.calls else ()
    if node.own:
        behind = node.own[len(late) :]
        order = behind if node.call.is_leaf else behind[::-1]
        if node.call.in_pairs:
            pairs = range(len(node.own) - 2, -1, -2)
            order, late = tuple(index for at in pairs for index in node.own[at : at + 2]), ()
        yield "gradients", node._replace(own=order)
    for inner in reversed(node.calls):
        yield from backward_of(inner)
    if late:
        yield "gradients", node._replace(own=late)
    if node.own and not node.call.is_leaf:
        yield "release", node


def with_recomputation(layer: Node, events: list[Event]) -> list[Event]:
    """Insert the layer's recomputation before the first gradients of its backward ``events``."""
    place = next((at for at, (kind, _) in enumerate(events) if kind == "gradients"), len(events))
    begun = [node for _, node in events[:place]]
    again: list[Event] = []
    for inner in layer.calls:
        for kind, node in forward_of(inner):
            if kind == "fetch":
                again.append(("again", node))
            elif not any(node is other for other in begun):
                again.append((kind, node))
    return [*events[:place], *again, *events[place:]]
