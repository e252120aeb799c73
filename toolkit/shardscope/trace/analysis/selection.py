"""Context of one slice: what it is connected to, where it was called from, other calls of its name."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np

from shardscope.trace.analysis.collectives import find_collectives
from shardscope.trace.analysis.intervals import Int64s
from shardscope.trace.analysis.modules import MODULE
from shardscope.trace.marks import find_slices_at
from shardscope.trace.nesting import mark_recursive_calls

if TYPE_CHECKING:
    from shardscope.trace.store import Trace

MAX_CONNECTIONS = 40
"""Maximum arrows of a slice: a slice around more launches has none, as they would hide the slices."""
MAX_CALLERS = 60


class Connection(TypedDict):
    """An arrow between two slices, both by index."""

    kind: Literal["launch", "flow", "collective"]
    """A launch and its kernel, the ends of a flow, or the same collective on two ranks."""
    source: int
    target: int


class NameStatistics(TypedDict):
    """All calls of one name and category on one rank."""

    rank: int
    count: int
    total_seconds: float
    """Recursive calls counted once."""
    mean_seconds: float
    min_seconds: float
    max_seconds: float
    share: float
    """Total over the rank's time, from its first slice to the end of its last."""
    num_on_all_ranks: int


class SelectionContext:
    """The context of slices of one trace; what all of them need is computed once."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def find_connections(self, index: int) -> list[Connection]:
        """Return the arrows from and to a slice.

        A CPU slice around launches also has those of the launches, unless they are more than
        :data:`MAX_CONNECTIONS`.
        """
        pairs: dict[tuple[int, int], Connection] = {}
        launches = self.trace.activity.launches
        work = np.array([index]) if launches[index] >= 0 else self._find_launched(index)
        for target in work.tolist():
            source = int(launches[target])
            pairs[source, target] = {"kind": "launch", "source": source, "target": target}
        sources, targets = self.trace.flows
        arrows = np.flatnonzero((sources == index) | (targets == index))[:MAX_CONNECTIONS]
        for source, target in zip(sources[arrows].tolist(), targets[arrows].tolist(), strict=True):
            if source != target:
                pairs.setdefault((source, target), {"kind": "flow", "source": source, "target": target})
        calls, slices = self._collectives
        call = calls[slices == index]
        if len(call):
            others = slices[(calls == call[0]) & (slices != index)]
            for other in others[:MAX_CONNECTIONS].tolist():
                pairs[index, other] = {"kind": "collective", "source": index, "target": other}
        return list(pairs.values())

    def _find_launched(self, index: int) -> Int64s:
        """Return the work that a slice launched itself or in the slices inside of it."""
        trace, launches = self.trace, self.trace.activity.launches
        own = np.flatnonzero(launches == index)
        if len(own):
            return own[:MAX_CONNECTIONS]
        work = np.flatnonzero(launches >= 0)
        calls = launches[work]
        start, end = int(trace.start_ns[index]), int(trace.activity.end_ns[index])
        inside = (trace.track_index[calls] == trace.track_index[index]) & (trace.start_ns[calls] >= start)
        inside &= (trace.activity.end_ns[calls] <= end) & (trace.depth[calls] > trace.depth[index])
        launched: Int64s = work[inside]
        return launched if len(launched) <= MAX_CONNECTIONS else launched[:0]

    @cached_property
    def _collectives(self) -> tuple[Int64s, Int64s]:
        """Number of each collective call that several ranks recorded, and its slice on one of them."""
        collectives = find_collectives(self.trace)
        calls = np.array([row["call"] for row in collectives], np.int64)
        slices = np.array(collectives.slices, np.int64)
        return calls[calls >= 0], slices[calls >= 0]

    def find_callers(self, index: int) -> list[str]:
        """Return the names of the slices around a slice, innermost first; Python frames after operators.

        Work on the GPU has the callers of its launch, which is the first of them.
        """
        trace, activity = self.trace, self.trace.activity
        callers: list[int] = []
        on_cpu = index
        if activity.on_gpu[index]:
            on_cpu = int(activity.launches[index])
            if on_cpu < 0:
                return []
            callers.append(on_cpu)
        callers += self._list_parents(on_cpu)
        track = trace.tracks[trace.track_index[on_cpu]]
        stacks = [
            number
            for number, one in enumerate(trace.tracks)
            if one.kind == "python" and track.kind != "python"
            if (one.rank, one.process, one.thread) == (track.rank, track.process, track.thread)
        ]
        if stacks:
            time = trace.start_ns[on_cpu : on_cpu + 1]
            frame = int(find_slices_at(trace, np.array(stacks[:1], np.int32), time)[0])
            if frame >= 0:
                callers += [frame, *self._list_parents(frame)]
        return [trace.names[trace.name_index[caller]] for caller in callers[:MAX_CALLERS]]

    def _list_parents(self, index: int) -> list[int]:
        parents: list[int] = []
        parent = int(self.trace.parents[index])
        while parent >= 0:
            parents.append(parent)
            parent = int(self.trace.parents[parent])
        return parents

    def measure_name(self, index: int) -> NameStatistics:
        """Return the statistics of the calls with the slice's name and category on its rank."""
        trace = self.trace
        same = trace.name_index == trace.name_index[index]
        same &= trace.category_index == trace.category_index[index]
        position = int(trace.activity.rank_position[index])
        rank_slices = trace.activity.slices_of_ranks[position]
        calls = np.flatnonzero(same[rank_slices]) + rank_slices.start
        durations = trace.duration_ns[calls]
        total = float(durations[~self._is_recursive[calls]].sum())
        span = int(trace.activity.end_ns[rank_slices].max()) - int(trace.start_ns[rank_slices].min())
        return {
            "rank": trace.ranks[position],
            "count": len(calls),
            "total_seconds": total / 1e9,
            "mean_seconds": float(durations.mean()) / 1e9,
            "min_seconds": int(durations.min()) / 1e9,
            "max_seconds": int(durations.max()) / 1e9,
            "share": total / span if span else 0.0,
            "num_on_all_ranks": int(same.sum()),
        }

    @cached_property
    def _is_recursive(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return mark_recursive_calls(self.trace.parents, self.trace.name_index)


def find_module(callers: list[str], args: dict[str, object]) -> str:
    """Return the innermost ``nn.Module`` among the callers, or the one that the arguments name; else ""."""
    for name in callers:
        if MODULE.match(name):
            return MODULE.sub("", name)
    hierarchy = args.get("Module Hierarchy")
    return hierarchy if isinstance(hierarchy, str) else ""
