"""Every collective call: bytes, bandwidth, arrival skew apart from transfer time, and exposed time."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, get_type_hints

import msgspec
import numpy as np

from shardscope.timing.report import format_seconds
from shardscope.trace.analysis.groups import GroupFinder, Times, infer_groups, list_families
from shardscope.trace.analysis.intervals import Int64s, find_exclusive_parts, measure_within
from shardscope.trace.analysis.operator_costs import find_element_bytes
from shardscope.trace.analysis.requests import Requests
from shardscope.trace.arguments import CollectiveArgs, ShapeArgs, decode_arguments, read_shapes, read_texts
from shardscope.trace.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardscope.core.plan import Plan
    from shardscope.trace.store import Trace

KINDS = (
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_reduce", r"all_?reduce"),
    ("all_gather", r"all_?gather"),
    ("all_to_all", r"all_?to_?all"),
    ("send_recv", r"send|recv"),
    ("broadcast", r"broadcast"),
    ("barrier", r"barrier"),
    ("reduce", r"reduce"),
    ("gather", r"gather"),
    ("scatter", r"scatter"),
)
UNKNOWN_KIND = "communication"
"""Kind of a call of which neither the name nor the arguments say what it does."""
_REDUCE_SCATTER = re.compile(r"c10d::_?reduce_scatter")
_SHARDED = {"c10d::_reduce_scatter_base_": "all_reduce", "c10d::_allgather_base_": "all_gather"}
"""Operators with one rank's shard and the full vector as inputs -> kind of the annotation that gloo adds."""
_RUN_REDUCE_SCATTER = re.compile(r"\w+:_?reduce_scatter|[nr]ccl\w*ReduceScatter")
_ANNOTATION = re.compile(r"(?:nccl|rccl|gloo|mpi|ucc|xccl|hccl):(\w+)")


class CollectiveRow(TypedDict):
    """One call on one rank. A field is None if it was not recorded."""

    rank: int
    name: str
    """Name of the kernel, or of the annotation on CPU ranks."""
    kind: str
    """``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``send_recv``, ..."""
    group: str
    """Description or name of the process group; empty if unknown."""
    axis: str
    """Axis of the mesh: "tp", "cp", "ep", "dp", "pp", or several joined by "+"; empty if unknown."""
    num_bytes: int | None
    """Bytes of the full vector: the output of an all-gather, the input of a reduction."""
    skew_seconds: float | None
    """Time before the last rank arrived: the duration beyond the shortest one of all ranks."""
    transfer_seconds: float | None
    """The shortest duration across ranks; None if only one rank's call was recorded."""
    algorithm_bandwidth: float | None
    """Bytes over the transfer time, in bytes/s."""
    bus_bandwidth: float | None
    """The same scaled by what each link carries, so that it compares with a link's speed."""
    exposed_seconds: float
    """Time during which the rank computes nothing; concurrent calls share it, so it adds up."""
    track: str
    """The track. This and the next ones are not columns of the data frame."""
    start_seconds: float
    seconds: float
    call: int
    """Number of the collective, the same on all of its ranks; -1 if no other rank's call was found."""
    group_size: int
    """Number of ranks of the group; 0 if unknown."""
    is_reduce_scatter: bool
    """Whether gloo ran a reduce-scatter as this all-reduce; False without recorded shapes."""


_MORE_KEYS = {"track", "start_seconds", "seconds", "call", "group_size", "is_reduce_scatter"}
COLUMNS = tuple(name for name in get_type_hints(CollectiveRow) if name not in _MORE_KEYS)


class AxisRow(TypedDict):
    """Calls of one kind along one axis, per step and averaged over ranks."""

    axis: str
    kind: str
    num_calls: float
    seconds: float
    skew_seconds: float | None
    transfer_seconds: float | None
    exposed_seconds: float
    bus_bandwidth: float | None
    """Bytes on a link of all calls over their transfer time, in bytes/s. A median would be that of the many
    calls of a few bytes, such as those of gradient norms."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The step with an axis's communication changed."""

    axis: str
    link_speed: float
    """Ratio of changed to present link speed; infinite: without the communication."""
    seconds: float
    """Seconds of a step of the slowest rank now."""
    changed_seconds: float
    """Seconds of a step with the change; another rank may then be the slowest."""
    has_steps: bool = True
    """Whether steps are marked in the trace; if not, the seconds are those of the whole recording."""

    @property
    def gain_seconds(self) -> float:
        """Seconds that a step gains."""
        return self.seconds - self.changed_seconds

    @property
    def text(self) -> str:
        """The result as a sentence."""
        what = (
            f"Without the exposed communication of {self.axis or 'unknown groups'}"
            if self.link_speed == float("inf")
            else f"With a link {self.link_speed:g} times as fast for {self.axis or 'unknown groups'}"
        )
        now, changed = format_seconds(self.seconds), format_seconds(self.changed_seconds)
        whole = "a step" if self.has_steps else "the recording"
        return f"{what}, {whole} would take {changed} instead of {now}."

    def __str__(self) -> str:
        return self.text


class Collectives(Table[CollectiveRow]):
    """Every collective call of every rank."""

    def __init__(self, trace: Trace, rows: list[CollectiveRow], slices: list[int]) -> None:
        super().__init__(rows, COLUMNS)
        self._trace = trace
        self.slices = slices
        """Index of each call's slice in the trace."""

    def sum_by_axis(self) -> Table[AxisRow]:
        """Return the calls summed by axis and kind, per step and averaged over ranks, most exposed first."""
        sums: dict[tuple[str, str], list[CollectiveRow]] = defaultdict(list)
        for row in self.list_in_steps():
            sums[row["axis"], row["kind"]].append(row)
        # Ranks may have recorded different numbers of steps.
        num_steps, num_ranks = self._trace.activity.steps_by_rank, len({row["rank"] for row in self})

        def compute_mean(calls: list[CollectiveRow], values: list[float | None]) -> float | None:
            by_rank: dict[int, float] = {}
            for call, value in zip(calls, values, strict=True):
                if value is not None:
                    by_rank[call["rank"]] = by_rank.get(call["rank"], 0.0) + value
            means = [seconds / num_steps[rank] for rank, seconds in by_rank.items()]
            return sum(means) / num_ranks if means else None

        rows: list[AxisRow] = []
        for (axis, kind), calls in sums.items():
            transfers = [
                (row["bus_bandwidth"], row["transfer_seconds"])
                for row in calls
                if row["bus_bandwidth"] is not None and row["transfer_seconds"] is not None
            ]
            seconds = sum(transfer for _, transfer in transfers)
            rows.append(
                {
                    "axis": axis,
                    "kind": kind,
                    "num_calls": compute_mean(calls, [1.0] * len(calls)) or 0.0,
                    "seconds": compute_mean(calls, [row["seconds"] for row in calls]) or 0.0,
                    "skew_seconds": compute_mean(calls, [row["skew_seconds"] for row in calls]),
                    "transfer_seconds": compute_mean(calls, [row["transfer_seconds"] for row in calls]),
                    "exposed_seconds": compute_mean(calls, [row["exposed_seconds"] for row in calls]) or 0.0,
                    "bus_bandwidth": sum(rate * transfer for rate, transfer in transfers) / seconds
                    if seconds
                    else None,
                }
            )
        rows.sort(key=lambda row: -row["exposed_seconds"])
        return Table(rows, tuple(get_type_hints(AxisRow)))

    def list_in_steps(self) -> list[CollectiveRow]:
        """Return the calls inside of marked steps; all calls of ranks without marks."""
        is_in_steps = self._trace.activity.is_in_steps[self.slices].tolist()
        return [row for row, is_inside in zip(self, is_in_steps, strict=True) if is_inside]

    def what_if(self, axis: str, link_speed: float = float("inf")) -> WhatIf:
        """Return the step's seconds if the axis's links were ``link_speed`` times as fast.

        Infinite, the default: without its exposed communication, skew included. A faster link shortens the
        transfer, not the skew, and gains no more than what is exposed; a slower one is taken to be exposed in
        full. Raises ``ValueError`` if the axis has no calls or ``link_speed`` is not positive.
        """
        axes = sorted({row["axis"] for row in self})
        if axis not in axes:
            allowed = ", ".join(map(repr, axes)) or "none, because this trace has no collectives"
            if axes == [""]:
                # Neither a name of a group nor the plan of a run tells what its ranks have in common.
                allowed = '"" for all of them, because this recording does not tell their axes'
            raise ValueError(f"what_if axis {axis!r} has no collectives. Allowed: {allowed}.")
        if not link_speed > 0:
            raise ValueError(
                f"what_if link_speed {link_speed} is not positive. Fix: 2.0 for twice the speed."
            )
        gains: dict[int, float] = defaultdict(float)
        for row in self.list_in_steps():
            if row["axis"] != axis:
                continue
            transfer = row["seconds"] if row["transfer_seconds"] is None else row["transfer_seconds"]
            exposed = row["exposed_seconds"]
            shorter = transfer - transfer / link_speed
            gains[row["rank"]] += exposed if link_speed == float("inf") else min(exposed, shorter)
        # A step is as long as its slowest rank's.
        steps = list_step_seconds(self._trace)
        return WhatIf(
            axis=axis,
            link_speed=link_speed,
            seconds=measure_step(self._trace),
            changed_seconds=max(seconds - gains[rank] / count for rank, (seconds, count) in steps.items()),
            has_steps=self._trace.activity.has_steps,
        )


def list_step_seconds(trace: Trace) -> dict[int, tuple[float, int]]:
    """Return each rank's mean seconds of a step and number of steps; without marks, its span is divided."""
    result: dict[int, tuple[float, int]] = {}
    for rank in trace.activity.ranks:
        count = trace.activity.steps_by_rank[rank.rank]
        steps = [step.end_ns - step.start_ns for step in rank.steps] or [rank.end_ns - rank.start_ns]
        result[rank.rank] = (sum(steps) / count / 1e9, count)
    return result


def measure_step(trace: Trace) -> float:
    """Return the mean seconds of a step of the slowest rank."""
    return max((seconds for seconds, _ in list_step_seconds(trace).values()), default=0.0)


@dataclass(kw_only=True)
class _Call:
    """One call on one rank, while it is assembled."""

    index: int
    rank: int
    kind: str
    group: str = ""
    description: str = ""
    group_ranks: tuple[int, ...] | None = None
    group_size: int = 0
    elements: int = -1
    num_bytes: int | None = None
    shard_bytes: int | None = None
    """Bytes of one rank's input of an all-gather, if only that is recorded."""
    call: int = -1
    transfer_ns: int | None = None
    is_reduce_scatter: bool = False


def find_collectives(trace: Trace, plan: Plan | None = None) -> Collectives:
    """Return every collective call; see :meth:`Trace.collectives`."""
    plan = plan or trace.plan
    calls = _list_calls(trace, GroupFinder(trace, plan.degrees if plan else None))
    _infer_groups(trace, calls)
    _match_calls(trace, calls)
    for call in calls:
        if call.shard_bytes is not None and call.group_size > 0:
            call.num_bytes = call.shard_bytes * call.group_size
    exposed = _measure_exposed(trace, [call.index for call in calls])
    finder = GroupFinder(trace, plan.degrees if plan else None)
    rows = [_make_row(trace, finder, call, int(ns)) for call, ns in zip(calls, exposed.tolist(), strict=True)]
    return Collectives(trace, rows, [call.index for call in calls])


def _make_row(trace: Trace, finder: GroupFinder, call: _Call, exposed_ns: int) -> CollectiveRow:
    duration, transfer = int(trace.duration_ns[call.index]), call.transfer_ns
    bandwidth = call.num_bytes / transfer * 1e9 if call.num_bytes and transfer else None
    factor = find_bus_factor(call.kind, call.group_size)
    axis = finder.find_axis(call.rank, call.group_ranks, call.description)
    return {
        "rank": call.rank,
        "name": trace.names[trace.name_index[call.index]],
        "kind": call.kind,
        "group": call.description or call.group,
        "axis": axis or (finder.find_message_axis() if call.kind == "send_recv" else ""),
        "num_bytes": call.num_bytes,
        "skew_seconds": None if transfer is None else (duration - transfer) / 1e9,
        "transfer_seconds": None if transfer is None else transfer / 1e9,
        "algorithm_bandwidth": bandwidth,
        "bus_bandwidth": bandwidth * factor if bandwidth is not None and factor is not None else None,
        "exposed_seconds": exposed_ns / 1e9,
        "track": trace.tracks[trace.track_index[call.index]].name,
        "start_seconds": int(trace.start_ns[call.index]) / 1e9,
        "seconds": duration / 1e9,
        "call": call.call,
        "group_size": call.group_size,
        "is_reduce_scatter": call.is_reduce_scatter,
    }


def find_gloo_note(trace: Trace) -> str:
    """Return a sentence on reduce-scatters that gloo recorded as all-reduces; empty if there are none."""
    # ProcessGroupGloo has no reduce-scatter: it reduces the whole vector, and each rank keeps its shard
    # (torch 2.13, ProcessGroupGloo::reduce_scatter_tensor_coalesced).
    requested = any(map(_REDUCE_SCATTER.match, trace.names))
    # Beside gloo, NCCL may have run them.
    if (
        not requested
        or "gloo:all_reduce" not in trace.names
        or any(map(_RUN_REDUCE_SCATTER.match, trace.names))
    ):
        return ""
    return "Reduce-scatters are among the all-reduces: gloo runs them as all-reduces."


def find_bus_factor(kind: str, num_ranks: int) -> float | None:
    """Return bus divided by algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md); None if size is unknown."""
    if kind in ("broadcast", "reduce", "send_recv"):
        return 1.0
    if num_ranks < 2:
        return None
    share = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}.get(
        kind
    )


def name_kind(text: str) -> str:
    """Return the kind of collective in a name of a kernel, an argument or an annotation.

    :data:`UNKNOWN_KIND` if it says none, as RCCL's ``ncclDevKernel_Generic``.
    """
    lowered = text.lower().replace("_coalesced", "")
    for kind, pattern in KINDS:
        if re.search(pattern, lowered):
            return kind
    return UNKNOWN_KIND


def find_call_kinds(trace: Trace, index: Int64s) -> list[str]:
    """Return the kind of collective of each slice of communication.

    The name decides where it is clear. NCCL's ``SendRecv`` kernel does all-to-alls, too, and RCCL has one
    kernel for all: there the arguments decide, or the operators around the launch.
    """
    kinds = [name_kind(trace.names[name]) for name in trace.name_index[index].tolist()]
    unclear = [position for position, kind in enumerate(kinds) if kind in (UNKNOWN_KIND, "send_recv")]
    arguments = decode_arguments(trace.arguments, index[unclear], CollectiveArgs)
    for position, args in zip(unclear, arguments, strict=True):
        annotation = ""
        if not args.collective:
            args, annotation, _ = _read_operators_around(trace, int(index[position]))
        kinds[position] = _choose_kind(kinds[position], annotation, args.collective)
    return kinds


def _choose_kind(*texts: str) -> str:
    """Return the kind in the last text that has one; "coalesced" has none."""
    kinds = [kind for text in texts if text and (kind := name_kind(text)) != UNKNOWN_KIND]
    return kinds[-1] if kinds else UNKNOWN_KIND


def _list_calls(trace: Trace, finder: GroupFinder) -> list[_Call]:
    """Return the calls of all ranks by rank and start."""
    activity = trace.activity
    index = np.flatnonzero(activity.is_communication)
    ranks = activity.rank_of_track[trace.track_index[index]]
    index = index[np.lexsort((trace.start_ns[index], ranks))]
    kinds = [name_kind(name) for name in trace.names]
    arguments = decode_arguments(trace.arguments, index, CollectiveArgs)
    calls = []
    for position, args in zip(index.tolist(), arguments, strict=True):
        rank = trace.tracks[trace.track_index[position]].rank
        call = _Call(index=position, rank=rank, kind=kinds[trace.name_index[position]])
        dims: ShapeArgs | None = None
        if not args.collective:
            args, annotation, dims = _read_operators_around(trace, position)
            call.kind = _choose_kind(call.kind, annotation)
        call.kind = _choose_kind(call.kind, args.collective)
        _set_group(finder, call, args)
        _set_bytes(call, args, dims)
        calls.append(call)
    return calls


def _read_operators_around(trace: Trace, position: int) -> tuple[CollectiveArgs, str, ShapeArgs | None]:
    """Return arguments, kind and shapes of the operators around a launch, for older recordings and gloo."""
    activity = trace.activity
    args, annotation, dims = CollectiveArgs(), "", None
    around = int(activity.launches[position]) if activity.on_gpu[position] else position
    while around >= 0:
        name = trace.names[trace.name_index[around]]
        match = _ANNOTATION.match(name)
        if match and not annotation:
            annotation = match[1]
            (dims,) = decode_arguments(trace.arguments, np.array([around]), ShapeArgs)
        if name == "record_param_comms":
            (args,) = decode_arguments(trace.arguments, np.array([around]), CollectiveArgs)
            break
        around = int(trace.parents[around])
    return args, annotation, dims


def _set_group(finder: GroupFinder, call: _Call, args: CollectiveArgs) -> None:
    group = finder.find_group(call.rank, args.group)
    call.group, call.description = args.group, args.description
    if args.description == "undefined":
        call.description = ""
    if group is not None:
        call.group_ranks, call.group_size = group.ranks, group.size
        call.description = call.description or (group.description if args.group else "")
    elif not args.group:
        call.group_size = finder.find_size(call.rank)
    if args.group_size > 0:
        call.group_size = args.group_size
    if call.group_ranks is None and args.group_ranks:
        try:
            # "[0, 1, ..., 127]" of a large group is incomplete and not JSON.
            members = msgspec.json.decode(args.group_ranks, type=tuple[int, ...])
        except msgspec.MsgspecError:
            members = ()
        if len(members) == call.group_size:
            call.group_ranks = members


def _set_bytes(call: _Call, args: CollectiveArgs, dims: ShapeArgs | None) -> None:
    """Set the bytes of the full vector from the numbers of elements, or from the shapes of the annotation."""
    if args.in_elements >= 0 and args.dtype:
        call.elements = max(args.in_elements, args.out_elements)
        width = find_element_bytes(args.dtype)
        call.num_bytes = call.elements * width if width else None
        return
    if dims is None:
        return
    shapes, types = read_shapes(dims), read_texts(dims.types)
    shape = shapes[0] if shapes else None
    width = find_element_bytes(types[0]) if types else None
    if shape is None or width is None:
        return
    call.elements = int(np.prod(shape, dtype=object))
    # The annotation has the shape of the input, which is one rank's shard in an all-gather.
    if call.kind != "all_gather":
        call.num_bytes = call.elements * width
    else:
        call.shard_bytes = call.elements * width


def _infer_groups(trace: Trace, calls: list[_Call]) -> None:
    """Set the group of calls that do not name it, from the times at which ranks are inside them together."""
    families = list_families(trace)
    by_size: dict[tuple[str, int], dict[int, list[_Call]]] = defaultdict(lambda: defaultdict(list))
    for call in calls:
        if not call.group:
            by_size[call.kind, call.elements][call.rank].append(call)
    sizes = _find_group_sizes(trace, by_size)
    times = {key: _list_times(trace, by_rank) for key, by_rank in by_size.items()}
    index = np.array([call.index for call in calls], np.int64)
    requests = Requests(trace, index, [call.kind for call in calls])
    for key, by_rank in _split_by_request(requests, by_size, sizes):
        size = sizes.get(key)
        joined = times[key] if size is not None else _list_times(trace, by_rank)
        if size is not None:
            for call in (call for rank_calls in by_rank.values() for call in rank_calls):
                call.is_reduce_scatter = call.kind == "all_reduce"
            # Gradients are reduced in the groups in which parameters of the same size are gathered.
            kind, elements = key
            other = (
                ("all_gather", elements // size) if kind == "all_reduce" else ("all_reduce", elements * size)
            )
            if sizes.get(other) == size and times[other].keys() == joined.keys():
                joined = {
                    rank: Times(*map(np.concatenate, zip(one, times[other][rank], strict=True)))
                    for rank, one in joined.items()
                }
        groups = infer_groups(joined, families, size)
        for rank, rank_calls in by_rank.items():
            for call in rank_calls:
                _leave_group_of_others(call, size, requests, trace.ranks)
                if call.group_ranks is None and rank in groups:
                    call.group_ranks, call.group_size = groups[rank], len(groups[rank])
                elif call.group_ranks is None:
                    call.group_size = size or call.group_size


def _split_by_request(
    requests: Requests,
    by_size: Mapping[tuple[str, int], Mapping[int, list[_Call]]],
    sizes: Mapping[tuple[str, int], int],
) -> Iterator[tuple[tuple[str, int], Mapping[int, list[_Call]]]]:
    """Yield calls that are in groups of one kind, such as all tensor-parallel ones, with kind and elements.

    Calls of one size whose group has an unknown number of ranks are divided by their requests: without
    recorded shapes, activations and gradients have the same kind and "size". If the requests of a rank are
    unknown, as of one whose file lost a few events, its calls would be apart from those of the others.
    """
    for key, by_rank in by_size.items():
        by_request: dict[str, dict[int, list[_Call]]] = defaultdict(lambda: defaultdict(list))
        for rank, rank_calls in by_rank.items():
            for call in rank_calls:
                by_request[requests.get_name(call.index)][rank].append(call)
        if key in sizes or "" in by_request:
            yield key, by_rank
            continue
        for part in by_request.values():
            yield key, part


def _leave_group_of_others(call: _Call, size: int | None, requests: Requests, recorded: list[int]) -> None:
    """Correct the group of a call without a name, which was taken for the only one with several ranks.

    Frameworks also make groups of one rank, such as Megatron's of each axis that is not divided. ``size`` is
    the group's number of ranks, if known.
    """
    ranks = call.group_ranks or ()
    others = [rank for rank in ranks if rank in recorded and rank != call.rank]
    if len(ranks) > 1 and (size == 1 or requests.is_alone(call.index, call.kind, call.rank, others)):
        call.group_ranks, call.group_size = (call.rank,), 1


def _list_times(trace: Trace, calls: Mapping[int, list[_Call]]) -> dict[int, Times]:
    """Return the starts and ends of each rank's calls."""
    index = {rank: np.array([call.index for call in rank_calls]) for rank, rank_calls in calls.items()}
    return {rank: Times(trace.start_ns[own], trace.activity.end_ns[own]) for rank, own in index.items()}


def _find_group_sizes(
    trace: Trace, calls: Mapping[tuple[str, int], Mapping[int, list[_Call]]]
) -> dict[tuple[str, int], int]:
    """Return the ranks of the group of calls by kind and elements, from the operators that requested them.

    These have shapes of one rank's shard and of the full vector, whose ratio is the size of the group. Left
    out are calls that other operators may have requested, too, and operators with groups of several sizes.
    """
    operators = np.flatnonzero(
        np.isin(trace.name_index, [i for i, n in enumerate(trace.names) if n in _SHARDED])
    )
    requests: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index, dims in zip(
        operators.tolist(), decode_arguments(trace.arguments, operators, ShapeArgs), strict=True
    ):
        sizes = [int(np.prod(shape, dtype=object)) for shape in read_shapes(dims)[:2] if shape]
        if len(sizes) < 2 or min(sizes) < 1 or max(sizes) % min(sizes):
            continue
        kind = _SHARDED[trace.names[trace.name_index[index]]]
        # The annotation has the shape of the input: the full vector of a reduce-scatter, else a shard.
        elements = max(sizes) if kind == "all_reduce" else min(sizes)
        requests[kind, elements].append(max(sizes) // min(sizes))
    return {
        key: sizes[0]
        for key, sizes in requests.items()
        if len(set(sizes)) == 1 and len(sizes) == sum(map(len, calls.get(key, {}).values()))
    }


def _match_calls(trace: Trace, calls: list[_Call]) -> None:
    """Find the calls that are one collective on several ranks, and set its transfer time.

    The n-th call of a kind in a group on one rank is the n-th on every other, as NCCL and gloo require it.
    The ranks leave a collective together, so the shortest duration, that of the last rank to arrive, is the
    transfer time. The others waited for the rest of theirs (TraceLens, docs on NCCL analysis).
    """
    by_key: dict[tuple[object, ...], dict[int, list[_Call]]] = defaultdict(lambda: defaultdict(list))
    for call in calls:
        # A stage's sends and receives pair with several others': only groups of two pair up in order.
        if call.kind == "send_recv" and call.group_size != 2:
            continue
        # Calls that do not name their group (gloo's annotations) may be of several: match them by size, too.
        named = (call.group,) if call.group else ("", call.elements)
        key = (call.group_ranks, call.kind, *named)
        by_key[key][call.rank].append(call)
    number = 0
    for by_rank in by_key.values():
        if len(by_rank) < 2:
            continue
        is_known = next(iter(by_rank.values()))[0].group_ranks is not None
        for together in _pair_up(trace, by_rank):
            if not is_known and not _overlap_in_time(trace, together):
                continue
            transfer = min(int(trace.duration_ns[call.index]) for call in together)
            is_whole_world = len(together) == trace.world_size
            for call in together:
                call.call, call.transfer_ns = number, transfer
                if call.group_size == 0 and is_whole_world:
                    call.group_size = len(together)
            number += 1


def _pair_up(trace: Trace, by_rank: Mapping[int, list[_Call]]) -> list[list[_Call]]:
    """Return the calls of the ranks that belong together: the n-th, or the n-th of each step."""
    if len({len(calls) for calls in by_rank.values()}) == 1:
        return [list(together) for together in zip(*by_rank.values(), strict=True)]
    # One rank recorded more: its profiler began earlier or ended later. Steps of one number still match.
    by_step: dict[tuple[int, int], list[_Call]] = defaultdict(list)
    for rank, calls in by_rank.items():
        steps = find_steps(trace, rank, np.array([call.index for call in calls]))
        seen: dict[int, int] = defaultdict(int)
        for call, step in zip(calls, steps, strict=True):
            by_step[step, seen[step]].append(call)
            seen[step] += 1
    counts: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for (step, _), together in by_step.items():
        for call in together:
            counts[step][call.rank] += 1
    return [
        together
        for (step, _), together in by_step.items()
        if step >= 0 and len(together) == len(by_rank) and len(set(counts[step].values())) == 1
    ]


def find_steps(trace: Trace, rank: int, index: Int64s) -> list[int]:
    """Return the step number in which each slice of one rank was launched; -1 outside of all steps."""
    activity = trace.activity
    described = activity.ranks[trace.ranks.index(rank)]
    if not described.steps:
        return [-1] * len(index)
    launches = np.where(activity.on_gpu[index], activity.launches[index], index)
    times = np.where(launches >= 0, trace.start_ns[launches], trace.start_ns[index])
    starts = np.array([step.start_ns for step in described.steps])
    position = np.searchsorted(starts, times, side="right") - 1
    return [
        described.steps[number].number if number >= 0 and time <= described.steps[number].end_ns else -1
        for number, time in zip(position.tolist(), times.tolist(), strict=True)
    ]


def _overlap_in_time(trace: Trace, together: list[_Call]) -> bool:
    """Return whether the ranks' calls overlap in time, as one collective does on a common clock."""
    index = [call.index for call in together]
    return int(trace.start_ns[index].max()) <= int(trace.activity.end_ns[index].min())


def _measure_exposed(trace: Trace, index: list[int]) -> Int64s:
    """Return each call's nanoseconds without compute; overlapping time counts for the earliest call."""
    activity, calls = trace.activity, np.array(index, np.int64)
    exposed = np.zeros(len(calls), np.int64)
    ranks = activity.rank_of_track[trace.track_index[calls]] if len(calls) else calls
    for rank in activity.ranks:
        positions = np.flatnonzero(ranks == rank.rank)
        start, end = find_exclusive_parts(trace.start_ns[calls[positions]], activity.end_ns[calls[positions]])
        exposed[positions] = (end - start) - measure_within(rank.compute, start, end)
    return exposed
