"""Operators that requested gloo's collectives, which run on a thread of gloo without naming their group."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
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


def name_requests(trace: Trace, index: Int64s, kinds: Sequence[str]) -> list[str]:
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
