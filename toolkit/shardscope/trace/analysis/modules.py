"""Time by ``nn.Module``, from the Python stacks of a trace with ``with_stack=True``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypedDict, get_type_hints

import numpy as np

from shardscope.trace.analysis.activity import RankActivity
from shardscope.trace.analysis.intervals import Int64s
from shardscope.trace.analysis.kernels import measure_work_ns
from shardscope.trace.arguments import SequenceArgs, decode_arguments
from shardscope.trace.table import Table

if TYPE_CHECKING:
    from shardscope.trace.store import Trace

MODULE = re.compile(r"nn\.Module: ")
_BACKWARD = "autograd::engine::evaluate_function: "


class ModuleRow(TypedDict):
    """All calls of one module of one rank. Times of kernels, or of operators on CPU ranks."""

    rank: int
    module: str
    """"Linear_3": the class, and the number that the profiler gives each module."""
    num_calls: int
    forward_seconds: float
    """Time of the work launched in its forward, without that of modules inside it."""
    backward_seconds: float
    """Time of the backward of those operators, found by autograd's sequence numbers."""
    host_seconds: float
    """Duration of its calls on the CPU, including modules inside it."""


def find_modules(trace: Trace) -> Table[ModuleRow]:
    """Return one row per rank and module; see :meth:`Trace.modules`."""
    rows: list[ModuleRow] = []
    is_module = trace.activity.mask_names(MODULE, "match") & trace.activity.is_python
    if is_module.any():
        work_ns = measure_work_ns(trace)
        for rank in trace.activity.ranks:
            rows += _list_rows(trace, rank, is_module, work_ns)
    reason = "the trace has no nn.Module calls, which torch.profiler records with with_stack=True"
    return Table(rows, tuple(get_type_hints(ModuleRow)), reason)


def _list_rows(
    trace: Trace, rank: RankActivity, is_module: np.ndarray[tuple[int], np.dtype[np.bool_]], work_ns: Int64s
) -> list[ModuleRow]:
    activity, first = trace.activity, rank.index.start
    modules = np.flatnonzero(is_module[rank.index]) + first
    if not len(modules):
        return []
    works = np.flatnonzero(work_ns[rank.index] > 0) + first
    works = works[~activity.is_communication[works]]
    # The operator or launch on the CPU tells when, and on which thread, the work was requested.
    origins = np.where(activity.on_gpu[works], activity.launches[works], works)
    works, origins = works[origins >= 0], origins[origins >= 0]
    forward = _find_modules_around(trace, modules, origins, is_module)
    backward = _find_modules_of_backward(trace, rank, modules, origins, is_module)
    names = trace.name_index
    size = len(trace.names)
    in_forward = forward >= 0
    in_backward = ~in_forward & (backward >= 0)
    forward_ns = np.bincount(names[forward[in_forward]], work_ns[works[in_forward]], size)
    backward_ns = np.bincount(names[backward[in_backward]], work_ns[works[in_backward]], size)
    host_ns = np.bincount(names[modules], trace.duration_ns[modules], size)
    counts = np.bincount(names[modules], minlength=size)
    rows: list[ModuleRow] = [
        {
            "rank": rank.rank,
            "module": MODULE.sub("", trace.names[name]),
            "num_calls": int(counts[name]),
            "forward_seconds": float(forward_ns[name]) / 1e9,
            "backward_seconds": float(backward_ns[name]) / 1e9,
            "host_seconds": float(host_ns[name]) / 1e9,
        }
        for name in np.flatnonzero(counts).tolist()
    ]
    return sorted(rows, key=lambda row: -(row["forward_seconds"] + row["backward_seconds"]))


def _find_modules_around(
    trace: Trace, modules: Int64s, origins: Int64s, is_module: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> Int64s:
    """Return the innermost module that runs on each slice's thread when it begins; -1 if none does."""
    innermost = np.full(len(origins), -1, np.int64)
    threads = {
        (track.rank, track.process, track.thread): number
        for number, track in enumerate(trace.tracks)
        if track.kind == "python"
    }
    stack_of_track = np.array(
        [threads.get((track.rank, track.process, track.thread), -1) for track in trace.tracks], np.int64
    )
    stacks = stack_of_track[trace.track_index[origins]]
    for stack in np.unique(trace.track_index[modules]).tolist():
        calls = modules[trace.track_index[modules] == stack]
        calls = calls[np.argsort(trace.start_ns[calls], kind="stable")]
        positions = np.flatnonzero(stacks == stack)
        times = trace.start_ns[origins[positions]]
        latest = np.searchsorted(trace.start_ns[calls], times, side="right") - 1
        candidate = np.where(latest >= 0, calls[np.maximum(latest, 0)], -1)
        # The latest module to begin may have ended: then the one around it runs, or the next one outwards.
        while True:
            ended = (candidate >= 0) & (trace.activity.end_ns[np.maximum(candidate, 0)] <= times)
            if not ended.any():
                break
            candidate[ended] = trace.activity.find_around(candidate[ended], is_module)
        innermost[positions] = candidate
    return innermost


def _find_modules_of_backward(
    trace: Trace,
    rank: RankActivity,
    modules: Int64s,
    origins: Int64s,
    is_module: np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> Int64s:
    """Return the module whose forward made the autograd node around each slice; -1 if there is none.

    Autograd gives a node and the operator that made it one sequence number. Several operators may have it, as
    linear and the addmm inside of it: all of them are in one module.
    """
    activity, first = trace.activity, rank.index.start
    is_node = np.array([name.startswith(_BACKWARD) for name in trace.names], bool)[trace.name_index]
    nodes = activity.find_around(origins, is_node)
    creators = np.full(len(origins), -1, np.int64)
    operators = np.flatnonzero(~activity.on_gpu[rank.index] & ~activity.is_wrapper[rank.index]) + first
    decoded = decode_arguments(trace.arguments, operators, SequenceArgs)
    numbers = np.array([args.sequence_number for args in decoded], np.int64)
    number_of = dict(zip(operators.tolist(), numbers.tolist(), strict=True))
    makers = operators[(numbers >= 0) & ~is_node[operators] & (activity.find_around(operators, is_node) < 0)]
    module_of_number: dict[int, int] = {}
    around = _find_modules_around(trace, modules, makers, is_module)
    for maker, module in zip(makers.tolist(), around.tolist(), strict=True):
        if module >= 0:
            module_of_number.setdefault(number_of[maker], module)
    for position, node in enumerate(nodes.tolist()):
        if node >= 0:
            creators[position] = module_of_number.get(number_of.get(node, -1), -1)
    return creators
