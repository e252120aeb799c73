"""Seconds of one collective on a ring (Thakur et al. 2005, section 4; NCCL's ring)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.catalog import entries

if TYPE_CHECKING:
    from shardscope.cluster import Cluster
    from shardscope.timing.traffic import Transfer

_ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
"""How often (ranks - 1) / ranks of the vector passes each rank."""


def seconds(transfer: Transfer, cluster: Cluster) -> float:
    """All calls of ``transfer`` in one step, as if nothing else ran.

    A group inside a node uses the node's own link. One that spans nodes crosses between them through the
    network cards of all its members on a node, and is no faster than its link inside of it.
    """
    ranks = transfer.ranks
    if ranks <= 1 or transfer.num_bytes <= 0 or transfer.times <= 0:
        return 0.0
    inside, between = cluster.intra_node_link, cluster.inter_node_link
    bandwidth, latency = inside.bandwidth_bytes_per_second, inside.latency_seconds
    if (ranks - 1) * transfer.stride >= cluster.gpus_per_node:
        members = max(1, cluster.gpus_per_node // transfer.stride)
        across = between.bandwidth_bytes_per_second * members
        bandwidth = across if members == 1 else min(bandwidth, across)
        latency = between.latency_seconds
    share: float = entries("efficiency")["link"]["share_of_peak"]
    bandwidth *= share
    rounds = _ROUNDS[transfer.collective]
    moved = rounds * (ranks - 1) / ranks * transfer.num_bytes / bandwidth
    return transfer.times * (moved + rounds * transfer.num_messages * (ranks - 1) * latency)
