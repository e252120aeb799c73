"""Process groups of collectives, and the axis of the device mesh that each belongs to."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardscope.trace.analysis.intervals import Int64s

if TYPE_CHECKING:
    from shardscope.core.layout import Degrees
    from shardscope.trace.loading.document import ProcessGroup
    from shardscope.trace.store import Trace

# Descriptions that Megatron-Core (parallel_state.py) and DeviceMesh (``mesh_dp_shard``) give their groups.
_DESCRIPTIONS = (
    (r"_AND_|EXPERT.*TENSOR.*PIPELINE|^MODEL_PARALLEL|INSTANCE", ""),  # groups of several axes
    (r"EXPERT.*DATA|expert.*dp", "dp"),
    (r"EXPERT.*TENSOR|TENSOR_MODEL|(?:^|[_-])tp(?:$|[_-])", "tp"),
    (r"EXPERT|(?:^|[_-])ep(?:$|[_-])", "ep"),
    (r"PIPELINE|EMBEDDING|(?:^|[_-])pp(?:$|[_-])", "pp"),
    (r"DATA_PARALLEL|(?:^|[_-])(?:dp|fsdp|hsdp|shard|replicate)(?:$|[_-])", "dp"),
    (r"CONTEXT|(?:^|[_-])cp(?:$|[_-])", "cp"),
)


def find_axis(ranks: tuple[int, ...] | None, description: str, degrees: Degrees | None) -> str:
    """Return the axis of a group: "tp", "cp", "ep", "dp", "pp", several joined by "+", or "" if unknown."""
    for pattern, axis in _DESCRIPTIONS:
        if re.search(pattern, description, re.IGNORECASE if pattern.islower() else 0):
            return axis
    if degrees is None:
        return ""
    if ranks is not None:
        return _compare_coordinates(ranks, degrees)
    sizes = {"tp": degrees.tp, "cp": degrees.cp, "dp": degrees.data_parallel, "pp": degrees.pp}
    several = [axis for axis, size in sizes.items() if size > 1]
    return several[0] if len(several) == 1 else ""


def _compare_coordinates(ranks: tuple[int, ...], degrees: Degrees) -> str:
    """Return the axes along which the coordinates of the group's ranks differ."""
    axes, stride = [], 1
    for axis, size in (
        ("tp", degrees.tp), ("cp", degrees.cp), ("dp", degrees.data_parallel), ("pp", degrees.pp)
    ):  # fmt: skip
        coordinates = {rank // stride % size for rank in ranks}
        stride *= size
        if len(coordinates) < 2:
            continue
        # Expert-parallel ranks are neighbours among the data-parallel ones.
        is_expert = axis == "dp" and 1 < degrees.ep == len(coordinates) < degrees.data_parallel
        axes.append("ep" if is_expert and max(coordinates) - min(coordinates) == degrees.ep - 1 else axis)
    return "+".join(axes)


class GroupFinder:
    """The process group of a collective, from its arguments and the groups in the head of the file."""

    def __init__(self, trace: Trace, degrees: Degrees | None) -> None:
        self.degrees = degrees
        self.groups = trace.process_groups
        self._only = {rank: _find_only_group(groups) for rank, groups in trace.process_groups.items()}

    def find_group(self, rank: int, name: str) -> ProcessGroup | None:
        """Return the named group; without a name (gloo's annotations), the only one with several ranks."""
        return self.groups.get(rank, {}).get(name) if name else self._only.get(rank)

    def find_size(self, rank: int) -> int:
        """Return the size that all groups of several ranks have; 0 if they differ or there is none."""
        sizes = {group.size for group in self.groups.get(rank, {}).values() if group.size > 1}
        return sizes.pop() if len(sizes) == 1 else 0

    def find_axis(self, rank: int, ranks: tuple[int, ...] | None, description: str) -> str:
        """Return the axis of a group; for an unknown one, the only axis of ``rank``'s described groups."""
        axis = find_axis(ranks, description, self.degrees)
        if axis or self.degrees is not None:
            return axis
        described = {
            find_axis(None, group.description, None)
            for group in self.groups.get(rank, {}).values()
            if group.size > 1 and ranks in (None, group.ranks)
        } - {""}
        return described.pop() if len(described) == 1 and not description else ""

    def find_message_axis(self) -> str:
        """Return the axis of a message whose group is unknown, as gloo's; "" if the plan has none or several.

        Pipeline stages and context-parallel ranks send messages, and no other axis does.
        """
        sizes = {"pp": self.degrees.pp, "cp": self.degrees.cp} if self.degrees is not None else {}
        several = [axis for axis, size in sizes.items() if size > 1]
        return several[0] if len(several) == 1 else ""


def _find_only_group(groups: dict[str, ProcessGroup]) -> ProcessGroup | None:
    candidates = [group for group in groups.values() if group.size > 1]
    return candidates[0] if len({group.ranks for group in candidates}) == 1 else None


class Times(NamedTuple):
    """Starts and ends of the calls of one kind and size on one rank, in order."""

    start: Int64s
    end: Int64s


Ranks = tuple[int, ...]
MIN_OVERLAP = 0.98
"""Minimum share of calls that overlap in time on all ranks of a group."""
MIN_SPREAD_RATIO = 1.5
"""Minimum ratio of the spread of other groups of the same size to that of the chosen ones."""
MAX_SPREAD_RATIO = 5.0
"""Maximum ratio of the spread, when ranks leave a call, of a chosen group to that of the best one."""


def list_families(trace: Trace) -> list[list[Ranks]]:
    """Return the ways in which process groups divide all ranks, such as into pairs; largest first.

    Groups may have further ranks, which were not recorded.
    """
    recorded = set(trace.ranks)
    known = {
        group.ranks
        for groups in trace.process_groups.values()
        for group in groups.values()
        if group.ranks is not None and group.size > 1 and recorded.intersection(group.ranks)
    }
    by_shape: dict[Ranks, list[Ranks]] = defaultdict(list)
    for ranks in known:
        by_shape[tuple(rank - ranks[0] for rank in ranks)].append(ranks)
    families = [
        sorted(groups)
        for groups in by_shape.values()
        if sorted(rank for ranks in groups for rank in ranks if rank in recorded) == sorted(recorded)
    ]
    return sorted(families, key=lambda groups: (-len(groups[0]), groups))


def infer_groups(
    times: Mapping[int, Times],
    families: list[list[Ranks]],
    recorded: Collection[int],
    size: int | None = None,
) -> dict[int, Ranks]:
    """Return the group of each rank, for calls that do not name it (gloo's annotations); empty if unclear.

    Ranks of one collective are inside it at the same time and leave it together. This holds for the true
    group and for smaller ones inside it, but hardly ever for others: the largest such group is chosen.
    ``size`` is the number of ranks of a group, if known. Of groups of one size, the one is chosen whose ranks
    leave most closely together; without a known size, only if they do so by far. Ranks of ``recorded`` that
    are not in ``times`` made no such call; others may have made it.
    """
    if size is not None:
        # Others may be in their calls at the same times: tensor-parallel ranks reduce their gradients
        # together, each with its own data-parallel group.
        families = [family for family in families if len(family[0]) == size]
    # Of groups that differ only in ranks that were not recorded, the smallest are taken.
    by_recorded = {
        frozenset(tuple(rank for rank in ranks if rank in recorded) for ranks in family): family
        for family in sorted(families, key=lambda family: -len(family[0]))
    }
    measured = [(_measure_spread(times, family, recorded), family) for family in by_recorded.values()]
    possible = [(spread, family) for spread, family in measured if spread is not None]
    least = min((spread for spread, _ in possible), default=0.0)
    possible = [(spread, family) for spread, family in possible if spread <= MAX_SPREAD_RATIO * least]
    if not possible:
        return {}
    largest = max(len(family[0]) for _, family in possible)
    same_size = sorted((one for one in possible if len(one[1][0]) == largest), key=lambda one: one[0])
    (spread, family), *others = same_size
    if size is None and others and others[0][0] < MIN_SPREAD_RATIO * spread:
        return {}  # as likely of either: of tensor-parallel pairs as of data-parallel ones
    return {rank: ranks for ranks in family for rank in ranks}


def _measure_spread(
    times: Mapping[int, Times], family: list[Ranks], recorded: Collection[int]
) -> float | None:
    """Return the median nanoseconds between the first and the last rank that leave; None without a match."""
    spreads: list[Int64s] = []
    overlaps: list[np.ndarray[tuple[int], np.dtype[np.bool_]]] = []
    for ranks in family:
        here = [rank for rank in ranks if rank in recorded]
        group_times = [times[rank] for rank in here if rank in times]
        # One rank alone, whose peers were not recorded, says nothing.
        if not group_times or len(here) < min(len(ranks), 2):
            continue
        if len(group_times) < len(here) or len({len(one.start) for one in group_times}) > 1:
            return None
        start, end = np.stack([one.start for one in group_times]), np.stack([one.end for one in group_times])
        spreads.append(end.max(axis=0) - end.min(axis=0))
        overlaps.append(start.max(axis=0) <= end.min(axis=0))
    if not spreads or np.concatenate(overlaps).mean() < MIN_OVERLAP:
        return None
    return max(float(np.median(np.concatenate(spreads))), 1.0)
