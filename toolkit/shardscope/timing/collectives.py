"""Seconds of one NCCL collective: a ring, or a tree for small messages.

Bandwidth terms: Thakur et al. 2005, section 4. Latency terms and the choice by the shorter time: NCCL 2.21,
src/graph/tuning.cc (ncclTopoTuneModel). Numbers may be arrays of plans.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import log2
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.ops import cache_by_numbers, ceil_div, map_distinct, maximum, minimum, where
from shardscope.timing.rates import LinkRate, Rates

if TYPE_CHECKING:
    from shardscope.timing.traffic import Collective, Transfer

_ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
"""How often (ranks - 1) / ranks of the vector passes through each rank."""
_SMALL_LATENCY = 0.2
"""Latency of NCCL's LL protocol relative to Simple: 0.6 of 3.4 µs on NVLink, 1.0 of 5.7 on PCIe, 2.7 of 14 on
the network (hwLatencies, ring)."""
_SMALL_BANDWIDTH = 0.5
"""LL sends a flag with every number: half of the traffic is payload (busBw of LL)."""


class Route(NamedTuple):
    """Placement of a process group on nodes."""

    members: Any
    """Ranks of the group per node."""
    num_nodes: Any
    """Number of nodes that the group spans."""


def route(ranks: Any, stride: Any, gpus_per_node: int) -> Route:
    """Return the placement of a group whose ranks are ``stride`` GPUs apart."""
    members = minimum(ranks, maximum(1, gpus_per_node // stride))
    # A group whose first and last rank are on one node is intra-node.
    return Route(members, where((ranks - 1) * stride < gpus_per_node, 1, ceil_div(ranks, members)))


def seconds(transfer: Transfer, gpus_per_node: int, rates: Rates) -> Any:
    """Return the seconds of all calls of ``transfer`` in one step, without overlap."""
    numbers = transfer.num_bytes, transfer.ranks, transfer.stride, transfer.num_messages
    return transfer.times * one_call(transfer.collective, *numbers, gpus_per_node, rates)


def one_call(
    collective: Collective,
    num_bytes: Any,
    ranks: Any,
    stride: Any,
    messages: Any,
    gpus_per_node: int,
    rates: Rates,
) -> Any:
    """Return the seconds of one collective, split into ``messages`` calls."""
    inside, between = rates.inside, rates.between
    way = route(ranks, stride, gpus_per_node)
    if collective == "send":
        each = _send(num_bytes, way, inside, between)
    elif collective == "all_to_all":
        each = _all_to_all(num_bytes, ranks, way, messages, inside, between)
    else:
        each = _ring_or_tree(collective, num_bytes, ranks, way, messages, inside, between)
    if measured := rates.collectives.get(collective):
        as_then = (ranks == measured.ranks) & (way.num_nodes == 1)
        each = where(as_then, measured.seconds(num_bytes, messages), each)
    return (ranks > 1) * each


@lru_cache(maxsize=64)
def calls_on(rates: Rates, gpus_per_node: int) -> Callable[[Collective, Any, Any, Any, Any], Any]:
    """Return a cached :func:`one_call` for this machine.

    The plans of a search, of a picker or of a series of suggested fixes have most calls in common.
    """

    def one(collective: Collective, num_bytes: Any, ranks: Any, stride: Any, messages: Any) -> Any:
        return one_call(collective, num_bytes, ranks, stride, messages, gpus_per_node, rates)

    return cache_by_numbers(one)


def bounding_link(transfer: Transfer, gpus_per_node: int, rates: Rates) -> LinkRate:
    """Return the link that bounds a transfer of one plan."""
    way = route(transfer.ranks, transfer.stride, gpus_per_node)
    inside, between = rates.inside, rates.between
    if way.num_nodes == 1:
        return inside
    many = transfer.collective in ("send", "all_to_all")
    across = between.bytes_per_second * (1 if many else way.members)
    return inside if way.members > 1 and inside.bytes_per_second < across else between


def _ring_or_tree(
    collective: Collective,
    num_bytes: Any,
    ranks: Any,
    way: Route,
    messages: Any,
    inside: LinkRate,
    between: LinkRate,
) -> Any:
    """Return the seconds of a ring, with one round per pass of the vector; an all-reduce may use a tree.

    Between nodes, a ring uses the network adapters of all its members on a node, each with its part of the
    vector, and is at most as fast as the intra-node link.
    """
    rounds = _ROUNDS[collective]
    across = between.bytes_per_second * way.members
    crossing = where(way.members > 1, minimum(inside.bytes_per_second, across), across)
    speed = where(way.num_nodes == 1, inside.bytes_per_second, crossing)
    moved = rounds * (ranks - 1) / ranks * num_bytes / speed
    # As many of the ring's steps cross between nodes as there are nodes.
    crossings = where(way.num_nodes > 1, way.num_nodes - 1, 0)
    steps = (ranks - 1 - crossings) * inside.latency_seconds + crossings * between.latency_seconds
    ring = _either_protocol(moved, rounds * messages * steps)
    if collective != "all_reduce":
        return ring
    depth = (way.members - 1) * inside.latency_seconds + _log2(way.num_nodes) * between.latency_seconds
    # Reduce up and broadcast down the tree; each rank passes on the whole vector.
    tree = _either_protocol(2 * num_bytes / speed, 2 * messages * depth)
    return minimum(ring, tree)


def _either_protocol(moved: Any, waited: Any) -> Any:
    """Return the shorter time of NCCL's Simple and LL protocols."""
    return minimum(moved + waited, moved / _SMALL_BANDWIDTH + _SMALL_LATENCY * waited)


def _all_to_all(
    num_bytes: Any, ranks: Any, way: Route, messages: Any, inside: LinkRate, between: LinkRate
) -> Any:
    """Return the seconds of an all-to-all.

    Each rank sends inter-node parts over its own network adapter, and intra-node parts at the same time.
    """
    away = (ranks - way.members) / ranks * num_bytes / between.bytes_per_second
    near = (way.members - 1) / ranks * num_bytes / inside.bytes_per_second
    latency = where(way.num_nodes > 1, between.latency_seconds, inside.latency_seconds)
    return maximum(where(way.num_nodes > 1, away, 0.0), near) + messages * latency


def _send(num_bytes: Any, way: Route, inside: LinkRate, between: LinkRate) -> Any:
    """Return the seconds of a send to the next rank; if the group spans nodes, of the inter-node hop."""
    near = num_bytes / inside.bytes_per_second + inside.latency_seconds
    across = num_bytes / between.bytes_per_second + between.latency_seconds
    return where(way.num_nodes == 1, near, across)


def _log2(number: Any) -> Any:
    return map_distinct(log2, number)
