"""The calls of collectives that a trace recorded: their kinds, groups, bytes, and which belong together."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from shardscope.trace.analysis.groups import GroupFinder, Times, infer_groups, list_families
from shardscope.trace.analysis.intervals import Int64s
from shardscope.trace.analysis.operator_costs import find_element_bytes
from shardscope.trace.analysis.requests import Requests
from shardscope.trace.arguments import (
    Args,
    CollectiveArgs,
    ShapeArgs,
    decode_arguments,
    read_shapes,
    read_texts,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
_SHARDED = {"c10d::_reduce_scatter_base_": "all_reduce", "c10d::_allgather_base_": "all_gather"}
"""Operators with one rank's shard and the full vector as inputs -> kind of the annotation that gloo adds."""
_DIRECTIONS = re.compile("send|recv")
_ANNOTATION = re.compile(r"(?:nccl|rccl|gloo|mpi|ucc|xccl|hccl):(\w+)")


@dataclass(kw_only=True)
class Call:
    """One call on one rank, while it is assembled."""

    index: int
    rank: int
    kind: str
    group: str = ""
    description: str = ""
    group_ranks: tuple[int, ...] | None = None
    group_size: int = 0
    elements: int = -1
    shape: tuple[int, ...] | None = None
    """Shape of the vector on a CPU rank; None if not recorded."""
    num_bytes: int | None = None
    shard_bytes: int | None = None
    """Bytes of one rank's input of an all-gather, if only that is recorded."""
    direction: str = ""
    """"send" or "recv" for a message of which the recording says so."""
    call: int = -1
    transfer_ns: int | None = None
    is_reduce_scatter: bool = False


def find_calls(trace: Trace, finder: GroupFinder) -> list[Call]:
    """Return the calls of all ranks by rank and start, with groups and bytes as far as they are known."""
    calls = _list_calls(trace, finder)
    _infer_groups(trace, calls)
    _match_calls(trace, calls)
    for call in calls:
        if call.shard_bytes is not None and call.group_size > 0:
            call.num_bytes = call.shard_bytes * call.group_size
    return calls


@cache
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
    for position, found in zip(unclear, _read_arguments(trace, index[unclear]), strict=True):
        kinds[position] = _choose_kind(kinds[position], found.annotation, found.args.collective)
    return kinds


def _choose_kind(*texts: str) -> str:
    """Return the kind in the last text that has one; "coalesced" has none."""
    kinds = [kind for text in texts if text and (kind := name_kind(text)) != UNKNOWN_KIND]
    return kinds[-1] if kinds else UNKNOWN_KIND


def _find_direction(*texts: str) -> str:
    """Return "send" or "recv", which the last of the texts that has only one of them says; else ""."""
    named = [_DIRECTIONS.findall(text.lower()) for text in texts]
    return next((found[0] for found in reversed(named) if len(set(found)) == 1), "")


def _list_calls(trace: Trace, finder: GroupFinder) -> list[Call]:
    """Return the calls of all ranks by rank and start."""
    activity = trace.activity
    index = np.flatnonzero(activity.is_communication)
    ranks = activity.rank_of_track[trace.track_index[index]]
    index = index[np.lexsort((trace.start_ns[index], ranks))]
    calls = []
    for position, found in zip(index.tolist(), _read_arguments(trace, index), strict=True):
        rank = trace.tracks[trace.track_index[position]].rank
        name = trace.names[trace.name_index[position]]
        kind = _choose_kind(name, found.annotation, found.args.collective)
        call = Call(index=position, rank=rank, kind=kind)
        if kind == "send_recv":
            call.direction = _find_direction(name, found.annotation, found.args.collective)
        _set_group(finder, call, found.args)
        _set_bytes(call, found.args, found.dims)
        calls.append(call)
    return calls


class _CallArguments(NamedTuple):
    """Recorded arguments of a call; for older recordings and gloo, those of the operators around it."""

    args: CollectiveArgs
    annotation: str = ""
    """Kind of collective in the name of the annotation around it."""
    dims: ShapeArgs | None = None
    """Shapes of that annotation's inputs."""


def _read_arguments(trace: Trace, index: Int64s) -> list[_CallArguments]:
    """Return the arguments of each slice of communication."""
    found = [_CallArguments(args) for args in decode_arguments(trace.arguments, index, CollectiveArgs)]
    positions = [position for position, one in enumerate(found) if not one.args.collective]
    around = [_find_operators_around(trace, position) for position in index[positions].tolist()]
    # All at once: a call of a decoder for each slice would decompress the same blocks again and again.
    annotated, requested = (np.array([one[side] for one in around], np.int64) for side in (0, 1))
    shapes = _decode_known(trace, annotated, ShapeArgs)
    arguments = _decode_known(trace, requested, CollectiveArgs)
    for number, position in enumerate(positions):
        annotation = annotated[number]
        match = _ANNOTATION.match(trace.names[trace.name_index[annotation]]) if annotation >= 0 else None
        found[position] = _CallArguments(
            arguments.get(number, CollectiveArgs()), match[1] if match else "", shapes.get(number)
        )
    return found


def _find_operators_around(trace: Trace, position: int) -> tuple[int, int]:
    """Return the annotation and the ``record_param_comms`` around a launch; -1 if there is none."""
    activity, annotation = trace.activity, -1
    around = int(activity.launches[position]) if activity.on_gpu[position] else position
    while around >= 0:
        name = trace.names[trace.name_index[around]]
        if annotation < 0 and _ANNOTATION.match(name):
            annotation = around
        if name == "record_param_comms":
            return annotation, around
        around = int(trace.parents[around])
    return annotation, -1


def _decode_known(trace: Trace, index: Int64s, kind: type[Args]) -> dict[int, Args]:
    """Return the arguments of the slices ``index`` by position, without those of -1."""
    known = np.flatnonzero(index >= 0)
    return dict(zip(known.tolist(), decode_arguments(trace.arguments, index[known], kind), strict=True))


def _set_group(finder: GroupFinder, call: Call, args: CollectiveArgs) -> None:
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


def _set_bytes(call: Call, args: CollectiveArgs, dims: ShapeArgs | None) -> None:
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
    call.shape = tuple(shape)
    call.elements = int(np.prod(shape, dtype=object))
    # The annotation has the shape of the input, which is one rank's shard in an all-gather.
    if call.kind != "all_gather":
        call.num_bytes = call.elements * width
    else:
        call.shard_bytes = call.elements * width


def _infer_groups(trace: Trace, calls: list[Call]) -> None:
    """Set the group of calls that do not name it, from the times at which ranks are inside them together."""
    families = list_families(trace)
    by_size: dict[tuple[str, int], dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for call in calls:
        if not call.group:
            by_size[call.kind, call.elements][call.rank].append(call)
    sizes = _find_group_sizes(trace, by_size)
    times = {key: _list_times(trace, by_rank) for key, by_rank in by_size.items()}
    index = np.array([call.index for call in calls], np.int64)
    requests = Requests(trace, index, [call.kind for call in calls])
    # With all ranks recorded, what only one of them calls is in a group of one, such as Megatron's loss in
    # the last stage.
    if len(trace.ranks) == trace.world_size > 1 and not trace.cut_off:
        for (kind, elements), of_size in by_size.items():
            if kind == "all_reduce" and len(of_size) == 1 and elements >= 0:
                ((rank, rank_calls),) = of_size.items()
                for call in rank_calls:
                    call.group_ranks, call.group_size = (rank,), 1
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
        groups = infer_groups(joined, families, trace.ranks, size)
        for rank, rank_calls in by_rank.items():
            for call in rank_calls:
                _leave_group_of_others(call, size, requests, trace.ranks)
                if call.group_ranks is None and rank in groups:
                    call.group_ranks, call.group_size = groups[rank], len(groups[rank])
                elif call.group_ranks is None:
                    call.group_size = size or call.group_size


def _split_by_request(
    requests: Requests,
    by_size: Mapping[tuple[str, int], Mapping[int, list[Call]]],
    sizes: Mapping[tuple[str, int], int],
) -> Iterator[tuple[tuple[str, int], Mapping[int, list[Call]]]]:
    """Yield calls that are in groups of one kind, such as all tensor-parallel ones, with kind and elements.

    Calls of one size whose group has an unknown number of ranks are divided by their shapes and requests:
    without recorded shapes, activations and gradients have the same kind and "size". If the requests of a
    rank are unknown, as of one whose file lost a few events, its calls would be apart from those of the
    others.
    """
    for key, of_size in by_size.items():
        by_shape = _split_by_shape(of_size) if key not in sizes else [of_size]
        for by_rank in by_shape:
            by_request: dict[str, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
            for rank, rank_calls in by_rank.items():
                for call in rank_calls:
                    by_request[requests.get_name(call.index)][rank].append(call)
            # gloo's threads may begin calls that were requested together, such as of one number and of a list
            # with one, in another order on each rank: then the request that is found is that of the other.
            is_mixed = len(by_shape) > 1 and any(
                len({len(part.get(rank, ())) for rank in by_rank}) > 1 for part in by_request.values()
            )
            if key in sizes or "" in by_request or is_mixed:
                yield key, by_rank
                continue
            for part in by_request.values():
                yield key, part


def _split_by_shape(of_size: Mapping[int, list[Call]]) -> list[Mapping[int, list[Call]]]:
    """Return calls of one number of elements by their shape.

    If all ranks have as many calls, but of other shapes, these are of one collective: a loss has the shape []
    in the last stage of a pipeline, and [1] where there is none.
    """
    counts = [Counter(call.shape for call in calls) for calls in of_size.values()]
    if len({count.total() for count in counts}) == 1 and any(count != counts[0] for count in counts):
        return [of_size]
    by_shape: dict[object, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for call in (call for rank_calls in of_size.values() for call in rank_calls):
        by_shape[call.shape][call.rank].append(call)
    return list(by_shape.values())


def _leave_group_of_others(call: Call, size: int | None, requests: Requests, recorded: list[int]) -> None:
    """Correct the group of a call without a name, which was taken for the only one with several ranks.

    Frameworks also make groups of one rank, such as Megatron's of each axis that is not divided. ``size`` is
    the group's number of ranks, if known.
    """
    ranks = call.group_ranks or ()
    others = [rank for rank in ranks if rank in recorded and rank != call.rank]
    if len(ranks) > 1 and (size == 1 or requests.is_alone(call.index, call.kind, call.rank, others)):
        call.group_ranks, call.group_size = (call.rank,), 1


def _list_times(trace: Trace, calls: Mapping[int, list[Call]]) -> dict[int, Times]:
    """Return the starts and ends of each rank's calls."""
    index = {rank: np.array([call.index for call in rank_calls]) for rank, rank_calls in calls.items()}
    return {rank: Times(trace.start_ns[own], trace.activity.end_ns[own]) for rank, own in index.items()}


def _find_group_sizes(
    trace: Trace, calls: Mapping[tuple[str, int], Mapping[int, list[Call]]]
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


def _match_calls(trace: Trace, calls: list[Call]) -> None:
    """Find the calls that are one collective on several ranks, and set its transfer time.

    The n-th call of a kind in a group on one rank is the n-th on every other, as NCCL and gloo require it.
    The ranks leave a collective together, so the shortest duration, that of the last rank to arrive, is the
    transfer time. The others waited for the rest of theirs (TraceLens, docs on NCCL analysis).
    """
    by_key: dict[tuple[object, str, str, int | None, int | None], dict[int, list[Call]]] = defaultdict(
        lambda: defaultdict(list)
    )
    senders = _find_senders(calls)
    for call in calls:
        # A stage's sends and receives pair with several others': only groups of two pair up in order.
        if call.kind == "send_recv" and call.group_size != 2:
            continue
        # Calls that do not name their group (gloo's annotations) may be of several: match them by size and
        # shape, too.
        size = call.elements if not call.group else None
        key = call.group_ranks, call.kind, call.group, size, senders.get(call.index)
        by_key[key][call.rank].append(call)
    parts: list[Mapping[int, list[Call]]] = []
    for (_, _, group, _, _), of_group in by_key.items():
        parts += [of_group] if group else _split_by_shape(of_group)
    number = 0
    for by_rank in parts:
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


def _find_senders(calls: list[Call]) -> dict[int, int]:
    """Return the rank that sends each message, by index, of groups of two in which all say whether they send.

    Stages send in both directions, and the order of sends and receives is another one on each.
    """
    by_group: dict[tuple[int, ...], list[Call]] = defaultdict(list)
    for call in calls:
        if call.kind == "send_recv" and call.group_ranks is not None and len(call.group_ranks) == 2:
            by_group[call.group_ranks].append(call)
    return {
        call.index: call.rank if call.direction == "send" else sum(ranks) - call.rank
        for ranks, messages in by_group.items()
        if {call.direction for call in messages} == {"send", "recv"}
        for call in messages
    }


def _pair_up(trace: Trace, by_rank: Mapping[int, list[Call]]) -> list[list[Call]]:
    """Return the calls of the ranks that belong together: the n-th, or the n-th of each step."""
    recorded = (one.steps for one in trace.activity.ranks if one.rank in by_rank and one.steps)
    has_same_steps = len({tuple(step.number for step in steps) for steps in recorded}) < 2
    if has_same_steps and len({len(calls) for calls in by_rank.values()}) == 1:
        return [list(together) for together in zip(*by_rank.values(), strict=True)]
    # A rank recorded more, or other steps: its profiler began earlier or later. Steps of one number match.
    by_step: dict[tuple[int, int], list[Call]] = defaultdict(list)
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


def _overlap_in_time(trace: Trace, together: list[Call]) -> bool:
    """Return whether the ranks' calls overlap in time, as one collective does on a common clock."""
    index = [call.index for call in together]
    return int(trace.start_ns[index].max()) <= int(trace.activity.end_ns[index].min())
