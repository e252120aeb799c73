"""Seconds of one collective on a ring (Thakur et al. 2005, section 4; NCCL's ring)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.timing.calibration import rates_for
from shardscope.timing.rates import LinkRate

if TYPE_CHECKING:
    from shardscope.cluster import Cluster
    from shardscope.timing.traffic import Transfer

ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
"""How often (ranks - 1) / ranks of the vector passes each rank."""


def seconds(transfer: Transfer, cluster: Cluster) -> float:
    """All calls of ``transfer`` in one step, as if nothing else ran."""
    ranks = transfer.ranks
    if ranks <= 1 or transfer.num_bytes <= 0 or transfer.times <= 0:
        return 0.0
    link = _link(transfer, cluster)
    rounds = ROUNDS[transfer.collective]
    moved = rounds * (ranks - 1) / ranks * transfer.num_bytes / link.bytes_per_second
    return transfer.times * (moved + rounds * transfer.num_messages * (ranks - 1) * link.latency_seconds)


def bounding_link(transfer: Transfer, cluster: Cluster) -> str:
    """The name of the link that bounds it."""
    return _link(transfer, cluster).name


def _link(transfer: Transfer, cluster: Cluster) -> LinkRate:
    """A group inside a node uses the node's own link.

    One that spans nodes crosses between them through the network cards of all its members on a node, and is
    no faster than its link inside of it.
    """
    rates = rates_for(cluster)
    inside, between = rates.inside, rates.between
    if (transfer.ranks - 1) * transfer.stride < cluster.gpus_per_node:
        return inside
    members = max(1, cluster.gpus_per_node // transfer.stride)
    across = between.bytes_per_second * members
    if members > 1 and inside.bytes_per_second < across:
        return inside._replace(latency_seconds=between.latency_seconds)
    return between._replace(bytes_per_second=across)
