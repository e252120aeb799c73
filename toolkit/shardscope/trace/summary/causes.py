"""Causes of a step's time, each as a sentence: exposed collectives, idle time, kernels and copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypedDict

import numpy as np

from shardscope.core.number_format import format_number
from shardscope.timing.report import format_seconds
from shardscope.trace.analysis.breakdown import (
    COLLECTIVE_WAIT,
    DATA_WAIT,
    HOST_BOUND,
    OTHER,
    BreakdownRow,
    IdleRow,
    compute_idle,
    measure_requests,
)
from shardscope.trace.analysis.collective_calls import KINDS, UNKNOWN_KIND
from shardscope.trace.analysis.collectives import (
    CollectiveRow,
    Collectives,
    find_gloo_note,
)
from shardscope.trace.analysis.kernels import MATRIX_KINDS, KernelRow, Kernels, find_kernels, shorten_name
from shardscope.trace.store import Trace
from shardscope.trace.summary.suggestions import Topic

MIN_SHARE = 0.02
"""Minimum share of a step for a sentence of its own."""
MIN_RANGE = 0.1
"""Minimum difference of ranks, as a share of a step, with which a sentence on idle time has their range."""


class Cause(TypedDict):
    """A cost in every step, as a sentence."""

    seconds: float
    """Seconds of a step."""
    text: str
    interval: tuple[int, str, float, float]
    """Rank, track, begin and end in seconds."""
    topics: tuple[Topic, ...]
    """Topics of :func:`suggest_change`, most specific first."""


def find_causes(trace: Trace, collectives: Collectives, step_seconds: float) -> list[Cause]:
    """Return what takes 2 % of a step or more, most time first.

    ``step_seconds`` is the mean length of a step.
    """
    kernels = find_kernels(trace, in_steps=True)
    causes = [
        *_find_exposed_communication(trace, collectives, step_seconds),
        *_find_idle(trace, step_seconds),
        *_find_kernels(trace, kernels, step_seconds),
        *_find_copies(trace, kernels, step_seconds),
    ]
    return sorted(causes, key=lambda cause: -cause["seconds"])


_AXES: tuple[Topic, ...] = ("tp", "cp", "ep", "pp", "dp")


def _format_share(trace: Trace, seconds: float, step_seconds: float) -> str:
    """Return seconds with their share of a step, or of the recording if no steps are marked."""
    whole = "a step" if trace.activity.has_steps else "the recording"
    return f"{format_seconds(seconds)} ({100 * seconds / step_seconds:.0f} %) of {whole}"


def _find_exposed_communication(
    trace: Trace, collectives: Collectives, step_seconds: float
) -> Iterator[Cause]:
    """Yield the exposed communication of each axis and kind that takes 2 % of a step."""
    in_steps = collectives.list_in_steps()
    # Without shapes, any all-reduce may be a reduce-scatter: the note is in the first sentence about them.
    has_known = any(call["is_reduce_scatter"] for call in in_steps)
    gloo_note = find_gloo_note(trace)
    for row in collectives.sum_by_axis():
        if row["exposed_seconds"] < MIN_SHARE * step_seconds:
            continue
        calls = [call for call in in_steps if (call["axis"], call["kind"]) == (row["axis"], row["kind"])]
        longest = max(calls, key=lambda call: call["exposed_seconds"])
        name = row["kind"].replace("_", "-")
        of_axis = f" of {row['axis']}" if row["axis"] else ""
        text = (
            f"Exposed {name}{of_axis}: {_format_share(trace, row['exposed_seconds'], step_seconds)}"
            f"{_describe_ranks(calls, trace.activity.steps_by_rank)}, in "
            f"{format_number_of(row['num_calls'], 'call')}{_describe_bytes(calls)}"
        )
        # Only of calls that several ranks recorded: how long the others waited is unknown.
        waits = [(call["skew_seconds"], call["seconds"]) for call in calls]
        known = sum(seconds for skew, seconds in waits if skew is not None)
        if known:
            share = 100 * sum(skew for skew, _ in waits if skew is not None) / known
            # The last one may be a rank that was not recorded.
            least = "at least " if trace.world_size > len(trace.ranks) else ""
            text += f"; {least}{share:.0f} % of their time is waiting for the last rank"
        note = ""
        if row["kind"] == "all_reduce" and (
            not has_known or any(call["is_reduce_scatter"] for call in calls)
        ):
            note, gloo_note = gloo_note, ""
        of_call = row["axis"].split("+")
        topics: list[Topic] = [axis for axis in _AXES if axis in of_call]
        if row["kind"] == "all_gather" and "dp" in of_call:
            topics.append("dp_all_gather")
        yield {
            "seconds": row["exposed_seconds"],
            "text": f"{text}. {note}".rstrip(),
            "interval": _locate_call(longest),
            "topics": tuple(topics),
        }


def _describe_ranks(calls: list[CollectiveRow], num_steps: Mapping[int, int]) -> str:
    """Return the range over ranks of a step's exposed seconds; empty if their mean says the same."""
    by_rank: dict[int, float] = {}
    for call in calls:
        seconds = call["exposed_seconds"] / num_steps[call["rank"]]
        by_rank[call["rank"]] = by_rank.get(call["rank"], 0.0) + seconds
    low, high = min(by_rank.values()), max(by_rank.values())
    if high < 1.1 * low:
        return ""
    return _format_ranks(low, high, len(by_rank))


def _format_ranks(low: float, high: float, num_ranks: int) -> str:
    return f" (mean of {num_ranks:,} ranks, {format_seconds(low)} to {format_seconds(high)})"


def format_number_of(number: float, what: str) -> str:
    """Return a number of things, which may be a mean: ``1 call``, ``2.5 calls``, ``1,234 slices``."""
    text = f"{number:,.0f}" if number >= 10 else f"{number:.3g}"
    return f"{text} {what}" if text == "1" else f"{text} {what}s"


def _locate_call(call: CollectiveRow) -> tuple[int, str, float, float]:
    return call["rank"], call["track"], call["start_seconds"], call["start_seconds"] + call["seconds"]


def _describe_bytes(calls: list[CollectiveRow]) -> str:
    sizes = [call["num_bytes"] for call in calls if call["num_bytes"] is not None]
    if len(sizes) < len(calls) or not sizes:
        return ""
    mean = sum(sizes) / len(sizes)
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if mean >= size:
            return f" of {format_number(mean / size)} {unit} on average"
    return f" of {mean:,.0f} bytes on average"


_IDLE_TEXTS = {
    HOST_BOUND: "the host launches work too late (host-bound)",
    COLLECTIVE_WAIT: "the host waits for a collective",
    DATA_WAIT: "the data loader has no batch yet",
    OTHER: "of something else: its work was queued already, or no launch of it is recorded",
}


def _find_idle(trace: Trace, step_seconds: float) -> Iterator[Cause]:
    """Yield the causes of idle time, averaged over ranks."""
    counts = trace.activity.steps_by_rank
    on_gpu = any(rank.on_gpu for rank in trace.activity.ranks)
    # Work that a file lost because it ends in the middle looks like idle time.
    rows = [row for row in compute_idle(trace, in_steps=True) if row["rank"] not in trace.cut_off]
    for cause, reason in _IDLE_TEXTS.items():
        cause_rows = [row for row in rows if row["cause"] == cause]
        of_ranks = [row["seconds"] / counts[row["rank"]] for row in cause_rows]
        seconds = sum(of_ranks) / max(len(of_ranks), 1)
        if seconds < MIN_SHARE * step_seconds:
            continue
        # One rank whose data loader is slow makes the others wait: the mean is true of neither.
        share, low, high = _format_share(trace, seconds, step_seconds), min(of_ranks), max(of_ranks)
        span = _format_ranks(low, high, len(of_ranks)) if high - low > MIN_RANGE * step_seconds else ""
        longest = max(cause_rows, key=lambda row: row["end_seconds"] - row["start_seconds"])
        gap = format_seconds(longest["end_seconds"] - longest["start_seconds"])
        if on_gpu:
            text = f"The GPU idles {share}{span} because {reason}"
        elif cause == OTHER:
            continue  # before and after the first and last operator
        elif cause == HOST_BOUND:
            text = f"Between operators (Python, dispatch): {share} on CPU ranks{span}"
            requests = measure_requests(trace)
            if requests >= MIN_SHARE * step_seconds:
                took = format_seconds(requests)
                text += f", {took} of it in operators of c10d that request or await collectives"
        else:
            text = f"CPU ranks idle {share}{span} because {reason}"
        yield {
            "seconds": seconds,
            "text": f"{text}; the longest gap is {gap} on rank {longest['rank']}.",
            "interval": _locate_gap(longest),
            "topics": ("host",) if cause == HOST_BOUND else (),
        }


def _locate_gap(row: IdleRow) -> tuple[int, str, float, float]:
    return row["rank"], row["track"], row["start_seconds"], row["end_seconds"]


def _find_kernels(trace: Trace, kernels: Kernels, step_seconds: float) -> Iterator[Cause]:
    """Yield the class of kernels that takes most of the compute, and matmuls without tensor cores."""
    num_steps = trace.activity.steps_by_rank
    compute: dict[str, float] = {}
    by_name: dict[tuple[str, str], float] = {}
    # Kernels that copy are compute, such as those of torch.cat. The copy engine's are not.
    engine_copies = _list_engine_copies(trace)
    for row in kernels:
        if row["kind"] not in _COMMUNICATION and row["name"] not in engine_copies:
            seconds = row["total_seconds"] / num_steps[row["rank"]] / len(trace.ranks)
            compute[row["kind"]] = compute.get(row["kind"], 0.0) + seconds
            key = row["name"], row["kind"]
            by_name[key] = by_name.get(key, 0.0) + seconds
    total = sum(compute.values())
    if not total:
        return
    busy = _measure_compute(trace)
    what = "kernels" if any(rank.on_gpu for rank in trace.activity.ranks) else "operators"
    kind = max(compute, key=lambda one: compute[one])
    kind_rows = [row for row in kernels if row["kind"] == kind and row["name"] not in engine_copies]
    top = max(kind_rows, key=lambda row: row["total_seconds"])
    title = "Unclassified" if kind == "other" else kind.capitalize()
    calls = format_number_of(top["num_calls"] / num_steps[top["rank"]], "call")
    per_step = " a step" if trace.activity.has_steps else ""
    # Kernels of several streams or GPUs that run at a time add up to more than the time of compute.
    concurrent = f", added up over {what} that run at a time" if total > 1.05 * busy else ""
    if not concurrent and compute[kind] > step_seconds and trace.activity.has_steps:
        # A kernel counts wholly to the step that launched it.
        concurrent = f", added up over {what}, some of which outlast the step"
    share_text = _format_share(trace, compute[kind], step_seconds) + concurrent
    text = (
        f"{title} {what} take most compute, {share_text}; "
        f"the costliest is {shorten_name(top['name'])}, {calls}{per_step} of "
        f"{format_seconds(top['mean_seconds'])} each"
    )
    if top["tflops"] is not None and top["peak_share"] is not None:
        speed = f"{format_number(top['tflops'])} TFLOP/s"
        text += f" at {speed}, {100 * top['peak_share']:.0f} % of the GPU's peak"
    elif top["bytes_per_second"] is not None and top["bandwidth_share"] is not None:
        text += f" at {100 * top['bandwidth_share']:.0f} % of the memory's bandwidth"
    # Many small kernels of a class may take more than the costliest one, which a reader asks for first.
    (name, its_kind), seconds = max(by_name.items(), key=lambda one: one[1])
    if its_kind != kind and seconds >= MIN_SHARE * step_seconds:
        its_class = "unclassified" if its_kind == "other" else its_kind
        text += (
            f". The costliest of all {what} is {shorten_name(name)} ({its_class}), "
            f"{_format_share(trace, seconds, step_seconds)}"
        )
    # A step that recomputes runs its forward twice, whatever its kernels are.
    topics: tuple[Topic, ...] = ("recomputation",)
    if kind not in MATRIX_KINDS:
        topics = ("elementwise", "recomputation")
    yield {
        "seconds": compute[kind],
        "text": f"{text}.",
        "interval": _locate_kernel(top),
        "topics": topics,
    }
    yield from _find_missing_tensor_cores(trace, kernels, compute, step_seconds)


def _find_missing_tensor_cores(
    trace: Trace, kernels: Kernels, compute: Mapping[str, float], step_seconds: float
) -> Iterator[Cause]:
    """Yield matmuls without tensor cores, if they take most of the time of matmuls."""
    share = kernels.tensor_core_share
    matrices = sum(compute.get(kind, 0.0) for kind in MATRIX_KINDS)
    if share is not None and share < 0.5 and matrices >= MIN_SHARE * step_seconds:
        slow = max(
            (row for row in kernels if row["uses_tensor_cores"] is False),
            key=lambda row: row["total_seconds"],
        )
        part = "None" if share < 0.005 else f"Only {100 * share:.0f} %"
        yield {
            "seconds": matrices * (1 - share),
            "text": f"{part} of the time of matmuls, convolutions and attention is on tensor cores: "
            f"{_format_share(trace, matrices * (1 - share), step_seconds)} is not.",
            "interval": _locate_kernel(slow),
            "topics": ("precision",),
        }


def _locate_kernel(row: KernelRow) -> tuple[int, str, float, float]:
    return row["rank"], row["track"], row["start_seconds"], row["start_seconds"] + row["longest_seconds"]


_COMMUNICATION = frozenset({UNKNOWN_KIND, *(kind for kind, _ in KINDS)})
"""Classes of :meth:`Trace.kernels` that communicate."""


def _list_engine_copies(trace: Trace) -> frozenset[str]:
    """Return the names of the copies by the GPU's copy engines (Memcpy, Memset)."""
    return frozenset(trace.names[i] for i in np.unique(trace.name_index[trace.activity.is_copy]).tolist())


def _list_step_rows(trace: Trace) -> list[BreakdownRow]:
    """Return the rows of steps, and of the whole recording for ranks without marks of steps."""
    unmarked = {rank.rank for rank in trace.activity.ranks if not rank.steps}
    return [*trace.steps(), *(row for row in trace.breakdown() if row["rank"] in unmarked)]


def _measure_compute(trace: Trace) -> float:
    """Return a step's seconds of compute, averaged over ranks; concurrent kernels count once."""
    num_steps = trace.activity.steps_by_rank
    rows = _list_step_rows(trace)
    return sum(row["compute_seconds"] / num_steps[row["rank"]] for row in rows) / len(trace.ranks)


def _find_copies(trace: Trace, kernels: Kernels, step_seconds: float) -> Iterator[Cause]:
    """Yield exposed copies, if they take 2 % of a step."""
    num_steps = trace.activity.steps_by_rank
    rows = _list_step_rows(trace)
    seconds = sum(row["copy_seconds"] / num_steps[row["rank"]] for row in rows) / len(trace.ranks)
    engine_copies = _list_engine_copies(trace)
    copies = [
        row
        for row in kernels
        if row["kind"] == "copy" and row["name"] in engine_copies and row["bytes_per_second"] is not None
    ]
    if seconds < MIN_SHARE * step_seconds or not copies:
        return
    top = max(copies, key=lambda row: row["total_seconds"])
    rate = (top["bytes_per_second"] or 0.0) / 1e9
    yield {
        "seconds": seconds,
        "text": f"Exposed copies: {_format_share(trace, seconds, step_seconds)}; the costliest is "
        f"{shorten_name(top['name'])} at {format_number(rate)} GB/s.",
        "interval": _locate_kernel(top),
        "topics": ("copies",),
    }
