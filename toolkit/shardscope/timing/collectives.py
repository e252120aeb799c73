"""Seconds of one NCCL collective: a ring, or a tree for small messages.

Bandwidth terms: Thakur et al. 2005, section 4. Latency terms and the choice by the shorter time: NCCL 2.21,
src/graph/tuning.cc (ncclTopoTuneModel). Numbers may be arrays of plans.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import gcd, log2
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np

from shardscope.core.ops import any_true, cache_by_numbers, map_distinct, maximum, minimum, where
from shardscope.timing.rates import LinkRate, Rates

if TYPE_CHECKING:
    from numpy.typing import NDArray

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

    fewest: int
    """Ranks of the group on the node that has the fewest: its network adapters bound the group's ring."""
    most: int
    """Ranks of the group on the node that has the most."""
    num_nodes: int
    """Number of nodes that the group spans."""


class SlowestGroups(NamedTuple):
    """Placements of the groups of one kind that others wait for: each other group is as fast as one of them.

    They differ only where nodes divide groups unequally: of groups of four ranks on nodes of six GPUs, some
    are on one node and some on two.
    """

    most_divided: Placement
    """A group with the fewest ranks on a node, and on the most nodes."""
    least_divided: Placement
    """A group with the most ranks on a node: it depends most on the link inside."""


def place_groups(ranks: int, stride: int, gpus_per_node: int) -> SlowestGroups:
    """Return the placements of the slowest groups of ``ranks`` ranks that are ``stride`` GPUs apart.

    The groups fill the cluster: its number of GPUs is a multiple of ``ranks * stride``. 0 GPUs apart: on one
    node.
    """
    return map_distinct(partial(_place_groups, gpus_per_node), ranks, stride)


@lru_cache(maxsize=2**12)
def _place_groups(gpus_per_node: int, ranks: int, stride: int) -> SlowestGroups:
    span = ranks * stride
    if stride == 0 or ranks == 1 or gpus_per_node % span == 0:
        return _place_equally(ranks, 1)
    if stride >= gpus_per_node:
        return _place_equally(1, ranks)
    if gpus_per_node % stride == 0 and span % gpus_per_node == 0:
        return _place_equally(gpus_per_node // stride, span // gpus_per_node)
    placements = _list_placements(gpus_per_node, ranks, stride)
    return SlowestGroups(
        min(placements, key=lambda one: (one.fewest, -one.num_nodes, -one.most)),
        max(placements, key=lambda one: (one.most, one.num_nodes, -one.fewest)),
    )


def _place_equally(ranks_per_node: int, num_nodes: int) -> SlowestGroups:
    placement = Placement(ranks_per_node, ranks_per_node, num_nodes)
    return SlowestGroups(placement, placement)


def _list_placements(gpus_per_node: int, ranks: int, stride: int) -> set[Placement]:
    """Return the placements of all groups whose stride is shorter than a node.

    The number of GPUs is a multiple of both a node and of the span of a group, so each distance between the
    starts of a span and of a node occurs: each multiple of their greatest common divisor.
    """
    # The ranks per node repeat after that many ranks, so long groups are counted without their middle.
    period = gpus_per_node // gcd(gpus_per_node, stride)
    left_out = max(0, ranks // period - 3)
    step = gcd(ranks * stride, gpus_per_node)
    spans = np.arange(0, gpus_per_node, step)
    starts = np.unique((spans[:, None] + np.arange(min(step, stride))) % gpus_per_node)
    nodes = (starts[:, None] + stride * np.arange(ranks - left_out * period)) // gpus_per_node
    placements = set()
    for group in nodes:
        counts = np.bincount(group)
        num_nodes = len(counts) + left_out * period * stride // gpus_per_node
        placements.add(Placement(int(counts.min()), int(counts.max()), num_nodes))
    return placements


@overload
def crosses_nodes(ranks: int, gpus_per_node: int) -> bool: ...
@overload
def crosses_nodes(ranks: NDArray[np.int64], gpus_per_node: int) -> NDArray[np.bool_]: ...
def crosses_nodes(ranks: int | NDArray[np.int64], gpus_per_node: int) -> bool | NDArray[np.bool_]:
    """Return whether groups of so many consecutive ranks are on several nodes, all or some of them."""
    return gpus_per_node % ranks > 0


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
    # All ranks of a step wait for the slowest group.
    groups = place_groups(ranks, stride, gpus_per_node)
    numbers = collective, num_bytes, ranks
    call_seconds = compute_placed_seconds(*numbers, groups.most_divided, messages, rates)
    if any_true(groups.least_divided.most > groups.most_divided.most):
        whole = compute_placed_seconds(*numbers, groups.least_divided, messages, rates)
        call_seconds = maximum(call_seconds, whole)
    # A product instead of ``where``: of an array of degrees, those of 1 need no collective.
    return (ranks > 1) * call_seconds


def compute_placed_seconds(
    collective: Collective, num_bytes: float, ranks: int, placement: Placement, messages: float, rates: Rates
) -> float:
    """Return the seconds of one collective of a group with this placement."""
    inside, between = rates.inside, rates.between
    if collective == "send":
        seconds = _compute_send(num_bytes, placement, inside, between)
    elif collective == "all_to_all":
        seconds = _compute_all_to_all(num_bytes, ranks, placement, messages, inside, between)
    else:
        seconds = _compute_ring_or_tree(collective, num_bytes, ranks, placement, messages, inside, between)
    # A measured curve replaces the formula only for groups like the measured one: as many ranks, on one node.
    if measured := rates.collectives.get(collective):
        was_measured = (ranks == measured.ranks) & (placement.num_nodes == 1)
        seconds = where(was_measured, measured.seconds(num_bytes, messages), seconds)
    return seconds


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
    groups = place_groups(transfer.ranks, transfer.stride, gpus_per_node)
    fewest, most = groups.most_divided.fewest, groups.least_divided.most
    inside, between = rates.inside, rates.between
    if groups.most_divided.num_nodes == 1:
        return inside
    # A send has the same bytes on every hop. Of an all-to-all most bytes leave the node, over the rank's own
    # adapter; a ring uses the adapters of all its members on a node.
    near, across = 1.0, 1.0
    if transfer.collective == "all_to_all":
        near, across = most - 1, transfer.ranks - fewest
    elif transfer.collective != "send":
        across = 1 / fewest
    is_inside = near / inside.bytes_per_second > across / between.bytes_per_second
    return inside if most > 1 and is_inside else between


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
    vector, so the node with the fewest members bounds it; it is at most as fast as the intra-node link.
    """
    # Bandwidth: the slowest link of the ring bounds all of it.
    rounds = _ROUNDS[collective]
    across = between.bytes_per_second * placement.fewest
    crossing = where(placement.most > 1, minimum(inside.bytes_per_second, across), across)
    speed = where(placement.num_nodes == 1, inside.bytes_per_second, crossing)
    moved = rounds * (ranks - 1) / ranks * num_bytes / speed
    # As many of the ring's steps cross between nodes as there are nodes.
    crossings = where(placement.num_nodes > 1, placement.num_nodes - 1, 0)
    steps = (ranks - 1 - crossings) * inside.latency_seconds + crossings * between.latency_seconds
    ring = _choose_protocol(moved, rounds * messages * steps)
    if collective != "all_reduce":
        return ring
    # NCCL's tree is a chain inside a node and a binary tree between nodes.
    depth = (placement.most - 1) * inside.latency_seconds + _compute_log2(
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
    away = (ranks - placement.fewest) / ranks * num_bytes / between.bytes_per_second
    near = (placement.most - 1) / ranks * num_bytes / inside.bytes_per_second
    latency = where(placement.num_nodes > 1, between.latency_seconds, inside.latency_seconds)
    return maximum(where(placement.num_nodes > 1, away, 0.0), near) + messages * latency


def _compute_send(num_bytes: float, placement: Placement, inside: LinkRate, between: LinkRate) -> float:
    """Return the seconds of a send to the next rank, of the slowest hop: all ranks of a group send at once.

    A group with one rank on each node has inter-node hops only.
    """
    near = num_bytes / inside.bytes_per_second + inside.latency_seconds
    across = num_bytes / between.bytes_per_second + between.latency_seconds
    slowest = where(placement.most > 1, maximum(near, across), across)
    return where(placement.num_nodes == 1, near, slowest)


def _compute_log2(number: float) -> float:
    return map_distinct(log2, number)
