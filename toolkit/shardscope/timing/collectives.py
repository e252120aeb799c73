"""Seconds of one NCCL collective: a ring, or a tree for small messages.

Bandwidth terms: Thakur et al. 2005, section 4. Latency terms and the choice by the shorter time: NCCL 2.21,
src/graph/tuning.cc (ncclTopoTuneModel). Numbers may be arrays of plans.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import log2
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import any_true, cache_by_numbers, ceil_div, map_distinct, maximum, minimum, where
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


class Placement(NamedTuple):
    """Placement of a process group on nodes."""

    members: int
    """Ranks of the group per node."""
    num_nodes: int
    """Number of nodes that the group spans."""


def place_group(ranks: int, stride: int, gpus_per_node: int) -> Placement:
    """Return the placement of a group whose ranks are ``stride`` GPUs apart.

    If the end of a node divides some groups of a kind, it is that of a divided one.
    """
    members = minimum(ranks, maximum(1, gpus_per_node // stride))
    # A group whose first and last rank are on one node is intra-node.
    num_nodes = where((ranks - 1) * stride < gpus_per_node, 1, ceil_div(ranks, members))
    is_divided = _is_divided(ranks, stride, gpus_per_node)
    # The smaller part of the first divided group: it has the fewest network adapters.
    on_first_node = gpus_per_node % (ranks * stride)
    fewest = maximum(1, minimum(on_first_node, ranks * stride - on_first_node) // stride)
    return Placement(where(is_divided, fewest, members), where(is_divided, 2, num_nodes))


def _is_divided(ranks: int, stride: int, gpus_per_node: int) -> bool:
    """Return whether groups fit into a node, but not a whole number of them: some are on two nodes.

    Of groups of three ranks on nodes of five GPUs, the second one has two on one node and one on the next.
    """
    span = ranks * stride
    return (span < gpus_per_node) & (gpus_per_node % span > 0)


def crosses_nodes(ranks: int, gpus_per_node: int) -> bool:
    """Return whether groups of so many consecutive ranks are on several nodes, all or some of them."""
    return place_group(ranks, 1, gpus_per_node).num_nodes > 1


def compute_transfer_seconds(transfer: Transfer, gpus_per_node: int, rates: Rates) -> float:
    """Return the seconds of all calls of ``transfer`` in one step, without overlap."""
    numbers = transfer.num_bytes, transfer.ranks, transfer.stride, transfer.num_messages
    return transfer.times * compute_call_seconds(transfer.collective, *numbers, gpus_per_node, rates)


def compute_call_seconds(
    collective: Collective,
    num_bytes: float,
    ranks: int,
    stride: int,
    messages: float,
    gpus_per_node: int,
    rates: Rates,
) -> float:
    """Return the seconds of one collective, split into ``messages`` calls."""
    inside, between = rates.inside, rates.between
    placement = place_group(ranks, stride, gpus_per_node)
    call_seconds = _compute_placed(collective, num_bytes, ranks, placement, messages, inside, between)
    is_divided = _is_divided(ranks, stride, gpus_per_node)
    if any_true(is_divided):
        # All ranks of a step wait for the slowest group: one on two nodes, or one inside a node.
        whole = _compute_placed(collective, num_bytes, ranks, Placement(ranks, 1), messages, inside, between)
        call_seconds = where(is_divided, maximum(call_seconds, whole), call_seconds)
    # A measured curve replaces the formula only for groups like the measured one: as many ranks, on one node.
    if measured := rates.collectives.get(collective):
        was_measured = (ranks == measured.ranks) & (placement.num_nodes == 1)
        call_seconds = where(was_measured, measured.seconds(num_bytes, messages), call_seconds)
    # A product instead of ``where``: of an array of degrees, those of 1 need no collective.
    return (ranks > 1) * call_seconds


def _compute_placed(
    collective: Collective,
    num_bytes: float,
    ranks: int,
    placement: Placement,
    messages: float,
    inside: LinkRate,
    between: LinkRate,
) -> float:
    """Return the seconds of one collective of a group with this placement."""
    if collective == "send":
        return _compute_send(num_bytes, placement, inside, between)
    if collective == "all_to_all":
        return _compute_all_to_all(num_bytes, ranks, placement, messages, inside, between)
    return _compute_ring_or_tree(collective, num_bytes, ranks, placement, messages, inside, between)


@lru_cache(maxsize=64)
def cache_calls(rates: Rates, gpus_per_node: int) -> Callable[[Collective, float, int, int, float], float]:
    """Return a cached :func:`compute_call_seconds` for this machine.

    The plans of a search, of a picker or of a series of suggested fixes have most calls in common.
    """

    def compute_call(
        collective: Collective, num_bytes: float, ranks: int, stride: int, messages: float
    ) -> float:
        return compute_call_seconds(collective, num_bytes, ranks, stride, messages, gpus_per_node, rates)

    return cache_by_numbers(compute_call)


def find_bounding_link(transfer: Transfer, gpus_per_node: int, rates: Rates) -> LinkRate:
    """Return the link that bounds a transfer of one plan."""
    placement = place_group(transfer.ranks, transfer.stride, gpus_per_node)
    inside, between = rates.inside, rates.between
    if placement.num_nodes == 1:
        return inside
    # A send has the same bytes on every hop. Of an all-to-all most bytes leave the node, over the rank's own
    # adapter; a ring uses the adapters of all its members on a node.
    near, across = 1.0, 1.0
    is_divided = _is_divided(transfer.ranks, transfer.stride, gpus_per_node)
    if transfer.collective == "all_to_all":
        near, across = placement.members - 1, transfer.ranks - placement.members
        near = transfer.ranks - 1 if is_divided else near
    elif transfer.collective != "send":
        across = 1 / placement.members
    is_inside = near / inside.bytes_per_second > across / between.bytes_per_second
    return inside if (placement.members > 1 or is_divided) and is_inside else between


def _compute_ring_or_tree(
    collective: Collective,
    num_bytes: float,
    ranks: int,
    placement: Placement,
    messages: float,
    inside: LinkRate,
    between: LinkRate,
) -> float:
    """Return the seconds of a ring, with one round per pass of the vector; an all-reduce may use a tree.

    Between nodes, a ring uses the network adapters of all its members on a node, each with its part of the
    vector, and is at most as fast as the intra-node link.
    """
    # Bandwidth: the slowest link of the ring bounds all of it.
    rounds = _ROUNDS[collective]
    across = between.bytes_per_second * placement.members
    crossing = where(placement.members > 1, minimum(inside.bytes_per_second, across), across)
    speed = where(placement.num_nodes == 1, inside.bytes_per_second, crossing)
    moved = rounds * (ranks - 1) / ranks * num_bytes / speed
    # As many of the ring's steps cross between nodes as there are nodes.
    crossings = where(placement.num_nodes > 1, placement.num_nodes - 1, 0)
    steps = (ranks - 1 - crossings) * inside.latency_seconds + crossings * between.latency_seconds
    ring = _choose_protocol(moved, rounds * messages * steps)
    if collective != "all_reduce":
        return ring
    # NCCL's tree is a chain inside a node and a binary tree between nodes.
    depth = (placement.members - 1) * inside.latency_seconds + _compute_log2(
        placement.num_nodes
    ) * between.latency_seconds
    # Reduce up and broadcast down the tree; each rank passes on the whole vector.
    tree = _choose_protocol(2 * num_bytes / speed, 2 * messages * depth)
    return minimum(ring, tree)


def _choose_protocol(moved: float, waited: float) -> float:
    """Return the shorter time of NCCL's Simple and LL protocols."""
    return minimum(moved + waited, moved / _SMALL_BANDWIDTH + _SMALL_LATENCY * waited)


def _compute_all_to_all(
    num_bytes: float, ranks: int, placement: Placement, messages: float, inside: LinkRate, between: LinkRate
) -> float:
    """Return the seconds of an all-to-all.

    Each rank sends inter-node parts over its own network adapter, and intra-node parts at the same time.
    """
    # Each rank sends 1/ranks of its vector to every other; its own part stays.
    away = (ranks - placement.members) / ranks * num_bytes / between.bytes_per_second
    near = (placement.members - 1) / ranks * num_bytes / inside.bytes_per_second
    latency = where(placement.num_nodes > 1, between.latency_seconds, inside.latency_seconds)
    return maximum(where(placement.num_nodes > 1, away, 0.0), near) + messages * latency


def _compute_send(num_bytes: float, placement: Placement, inside: LinkRate, between: LinkRate) -> float:
    """Return the seconds of a send to the next rank, of the slowest hop: all ranks of a group send at once.

    A group with one rank on each node has inter-node hops only.
    """
    near = num_bytes / inside.bytes_per_second + inside.latency_seconds
    across = num_bytes / between.bytes_per_second + between.latency_seconds
    slowest = where(placement.members > 1, maximum(near, across), across)
    return where(placement.num_nodes == 1, near, slowest)


def _compute_log2(number: float) -> float:
    return map_distinct(log2, number)
