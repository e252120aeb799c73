"""Process groups of collectives, and the axis of the device mesh that each belongs to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.core.layout import Degrees
    from shardscope.trace.recordings import ProcessGroup
    from shardscope.trace.store import Trace

AXES = ("tp", "cp", "ep", "dp", "pp")
"""Axes of the mesh, innermost first: neighbouring ranks are tensor-parallel, distant ones are stages.

All four engines order ranks so: Megatron's ``tp-cp-ep-dp-pp``, torchtitan's mesh and DeepSpeed's topology.
"""

# Descriptions that Megatron-Core (parallel_state.py) and DeviceMesh (``mesh_dp_shard``) give their groups.
_DESCRIPTIONS = (
    (r"EXPERT.*DATA|expert.*dp", "dp"),
    (r"EXPERT.*TENSOR.*PIPELINE|^MODEL_PARALLEL", ""),
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
    if ranks is not None and len(ranks) > 1:
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
        """Return the axis of a group of ``rank``; for one that is not known, the only axis that there is."""
        axis = find_axis(ranks, description, self.degrees)
        if axis or self.degrees is not None:
            return axis
        described = {
            find_axis(None, group.description, None)
            for group in self.groups.get(rank, {}).values()
            if group.size > 1
        } - {""}
        return described.pop() if len(described) == 1 and not description else ""


def _find_only_group(groups: dict[str, ProcessGroup]) -> ProcessGroup | None:
    several = [group for group in groups.values() if group.size > 1]
    return several[0] if len({group.ranks for group in several}) == 1 else None
