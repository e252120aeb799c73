"""Differences between the clocks of a run's nodes, measured where the ranks begin their task.

All ranks leave one barrier before the task, and then write the time into their records (``rank.py``). Event
times stay on each node's own clock; code that compares times of two nodes subtracts the offset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import read_json
from shardscope.records.json_values import is_int, is_number

MIN_SECONDS = 5.0
"""Smallest offset that counts: ranks on busy machines leave the barrier up to some seconds apart."""
MAX_NODES = 20_000
"""Most nodes of a run: its folder may come from anybody."""


class ClockOffsets(NamedTuple):
    """Seconds by which the nodes' clocks are ahead of that of node 0."""

    seconds: Mapping[int, float]
    """By node; nodes whose clock agrees with that of node 0, or is not known, are left out."""
    ranks_per_node: int

    def of_node(self, node: int) -> float:
        """Return the offset of a node's clock, 0.0 if it agrees or is not known."""
        return self.seconds.get(node, 0.0)

    def of_rank(self, rank: int) -> float:
        """Return the offset of the clock of a rank's node."""
        return self.of_node(rank // self.ranks_per_node)


def sum_seconds(times: Sequence[float]) -> float:
    """Return the seconds from the first to the last of times in the order of their events.

    A step back is left out: the clock was set, or the next event is by the clock of another machine.
    """
    return sum(max(0.0, after - before) for before, after in pairwise(times))


NO_OFFSETS = ClockOffsets({}, 1)


def read_clock_offsets(folder: RunFolder) -> ClockOffsets:
    """Return the offsets of a run's attempt, by default the latest; none before its ranks have begun."""
    if not folder.has_nodes:
        return NO_OFFSETS
    description = read_json(folder.run_json) or {}
    num_nodes, world_size = description.get("num_nodes"), description.get("world_size")
    if not is_int(num_nodes) or not is_int(world_size) or not 1 < num_nodes <= min(world_size, MAX_NODES):
        return NO_OFFSETS
    attempt = folder.attempt
    parts = [NodeFolder(folder.path, number, num_nodes, attempt) for number in range(num_nodes)]
    ready = [(read_json(part.rank(part.select_ranks(world_size)[0])) or {}).get("ready") for part in parts]
    began = ready[0]
    if not is_number(began):
        return NO_OFFSETS
    offsets = {number: when - began for number, when in enumerate(ready) if is_number(when)}
    return ClockOffsets(
        {number: seconds for number, seconds in offsets.items() if abs(seconds) >= MIN_SECONDS},
        world_size // num_nodes,
    )
