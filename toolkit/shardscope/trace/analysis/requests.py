"""Operators that requested gloo's collectives, which run on a thread of gloo without naming their group."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from shardscope.trace.analysis.intervals import Int64s

if TYPE_CHECKING:
    from shardscope.trace.store import Trace

_REQUEST = re.compile(
    r"c10d::_?(?:(all_?reduce|reduce_scatter)|(all_?gather)|(all_?to_?all)|(broadcast)|(barrier))"
)
_KINDS = ("all_reduce", "all_gather", "all_to_all", "broadcast", "barrier")
"""Kinds of gloo's annotations, by the group of :data:`_REQUEST`. It runs reduce-scatters as all-reduces."""
_NUMBER = re.compile(r"\d+")


class Requests:
    """The operators that requested calls of CPU ranks, by call and by rank."""

    def __init__(self, trace: Trace, index: Int64s, kinds: Sequence[str]) -> None:
        """Find the requests of the calls at ``index``, all of the trace, with their ``kinds``."""
        self._names: dict[int, str] = dict(
            zip(index.tolist(), _name_requests(trace, index, kinds), strict=True)
        )
        self._counts: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
        """Numbers of each rank's requests of a kind, without the ranks whose files lost some."""
        for position, kind in zip(index.tolist(), kinds, strict=True):
            rank = trace.tracks[trace.track_index[position]].rank
            if rank not in trace.cut_off:
                self._counts[kind, rank][self._names[position]] += 1

    def get_name(self, call: int) -> str:
        """Return the operator that requested a call and the function around it; "" if unknown."""
        return self._names[call]

    def is_alone(self, call: int, kind: str, rank: int, others: Collection[int]) -> bool:
        """Return whether the others made the same requests as ``rank``, without those of this call's name.

        If numbers of others differ, too, they may have recorded less, or under another name.
        """
        name, own = self._names[call], self._counts[kind, rank]
        if not name or not others:
            return False
        for other in others:
            counts = self._counts[kind, other]
            if not counts or name in counts or "" in counts:
                return False
            if any(own[request] != count for request, count in counts.items()):
                return False
        return True


def _name_requests(trace: Trace, index: Int64s, kinds: Sequence[str]) -> list[str]:
    """Return the operator that requested each call of a CPU rank and the function around it; "" if unknown.

    ``index`` are all calls, and ``kinds`` their kinds. gloo runs the calls of a kind in the order of their
    requests. If a recording has other numbers of both, it began or ended between a request and its call, and
    nothing is known. Numbers in names, such as those of steps and layers, are left out.
    """
    matches = [_REQUEST.match(name) for name in trace.names]
    kind_of_name = [_KINDS[match.lastindex - 1] if match and match.lastindex else "" for match in matches]
    is_request = np.array([bool(kind) for kind in kind_of_name], dtype=bool)
    if not is_request.any():
        return [""] * len(index)
    requests: dict[tuple[int, str], list[int]] = defaultdict(list)
    operators = np.flatnonzero(is_request[trace.name_index] & ~trace.activity.on_gpu)
    for operator in operators[np.argsort(trace.start_ns[operators], kind="stable")].tolist():
        rank = trace.tracks[trace.track_index[operator]].rank
        requests[rank, kind_of_name[trace.name_index[operator]]].append(operator)
    calls: dict[tuple[int, str], list[int]] = defaultdict(list)
    for position in np.argsort(trace.start_ns[index], kind="stable").tolist():
        if trace.activity.on_gpu[index[position]]:
            continue  # several streams run them in another order
        rank = trace.tracks[trace.track_index[index[position]]].rank
        calls[rank, kinds[position]].append(position)
    names = [""] * len(index)
    for key, positions in calls.items():
        if len(requests[key]) != len(positions):
            continue
        for position, operator in zip(positions, requests[key], strict=True):
            around = int(trace.parents[operator])
            texts = [trace.names[trace.name_index[one]] for one in (operator, around) if one >= 0]
            names[position] = " in ".join(_NUMBER.sub("", text) for text in texts)
    return names
