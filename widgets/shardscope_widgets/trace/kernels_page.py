"""The page of a trace's kernels: by name, with their class, rates and occupancy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from shardscope.core.number_format import Scale
from shardscope.trace import Trace
from shardscope.trace.analysis.collective_calls import KINDS as COLLECTIVE_KINDS
from shardscope.trace.analysis.kernels import KernelRow, find_kernels
from shardscope_widgets.kit.numbers import format_three_digits
from shardscope_widgets.trace.analysis_page import (
    MAX_ROWS,
    NO_GPU,
    NONE,
    AnalysisPage,
    Heading,
    Interval,
    Row,
    TableWriter,
    describe_option,
    format_calls,
    format_share,
    has_gpu_work,
    has_steps,
    name_kind,
    name_total,
)
from shardscope_widgets.trace.roofline_figure import draw_roofline

FULL_EFFICIENCY = 0.9
"""Share of used multiprocessors from which their column says nothing."""


def describe_kernels(trace: Trace) -> AnalysisPage:
    """Return kernels by name, averaged over ranks, and the share of each class in a sentence."""
    kernels = find_kernels(trace, in_steps=True)
    on_gpu = has_gpu_work(trace)
    if not kernels:
        return AnalysisPage(sentences=["No kernel and no operator was recorded."])
    names: dict[tuple[str, str], list[KernelRow]] = defaultdict(list)
    for row in kernels:
        names[row["name"], row["kind"]].append(row)
    total = sum(row["total_seconds"] for row in kernels)
    # Sums over ranks and steps become those of one rank's step.
    num_parts = {rank: len(trace.ranks) * count for rank, count in trace.activity.steps_by_rank.items()}
    groups = sorted(names.items(), key=lambda group: -sum(row["total_seconds"] for row in group[1]))
    scale = Scale.for_seconds(sum(row["total_seconds"] / num_parts[row["rank"]] for row in groups[0][1]))
    shown = [row for _, group in groups[:MAX_ROWS] for row in group]
    means = [
        sum(row["total_seconds"] for row in group) / max(sum(row["num_calls"] for row in group), 1)
        for _, group in groups
    ]
    mean_scale = Scale.for_column(means[:MAX_ROWS])
    measures = _choose_measures(shown)
    headings = [
        Heading("kernel" if on_gpu else "operator"),
        Heading("class", is_text=True),
        Heading("calls a step" if has_steps(trace) else "calls", "calls of one rank"),
        Heading(
            f"{name_total(trace)}, {scale.unit}",
            "mean over ranks" + ("" if on_gpu else ", without what it calls"),
        ),
        Heading(f"mean, {mean_scale.unit}", "of one call"),
        Heading("share", "share of all kernel time"),
        *(measure.heading for measure in measures),
    ]
    writer = TableWriter()
    rows = []
    for ((name, kind), group), mean in zip(groups, means, strict=True):
        seconds = sum(row["total_seconds"] for row in group)
        longest = max(group, key=lambda row: row["longest_seconds"])
        cells = [
            name,
            name_kind(kind),
            format_calls(sum(row["num_calls"] / num_parts[row["rank"]] for row in group)),
            scale.format(sum(row["total_seconds"] / num_parts[row["rank"]] for row in group)),
            mean_scale.format(mean),
            format_share(seconds / total if total else 0.0),
            *(_format_measure(measure, group) for measure in measures),
        ]
        start = longest["start_seconds"]
        interval = Interval(
            start, start + longest["longest_seconds"], longest["rank"], longest["track"] or None
        )
        rows.append(Row(cells, interval))
    sentences = [_describe_kernel_kinds(kernels)]
    if not on_gpu:
        sentences.append(
            f"{NO_GPU}: operators by the time that they compute themselves, without tensor cores and "
            "occupancy."
        )
    elif kernels.tensor_core_share is not None:
        share = format_share(kernels.tensor_core_share)
        sentences.append(f"{share} of the time of matmuls, convolutions and attention is on tensor cores.")
    if not any(measure.key == "tflops" for measure in measures):
        sentences.append(f"Without shapes in the recording there are no TFLOP/s. {describe_option('shapes')}")
    roofline = draw_roofline(trace)
    if roofline is not None:
        sentences.append(roofline[1])
    return AnalysisPage(
        sentences=sentences,
        tables=[writer.write(headings, rows)],
        intervals=writer.intervals,
        figures=[] if roofline is None else [roofline[0]],
    )


def _describe_kernel_kinds(kernels: Sequence[KernelRow]) -> str:
    """Return the share of each class of kernels, largest first."""
    kinds: dict[str, float] = defaultdict(float)
    for row in kernels:
        kinds[row["kind"]] += row["total_seconds"]
    total = sum(row["total_seconds"] for row in kernels)
    shares = ", ".join(
        f"{name_kind(kind)} {format_share(seconds / total)}"
        for kind, seconds in sorted(kinds.items(), key=lambda item: -item[1])[:6]
        if total
    )
    return f"By class: {shares}."


class _Measure(NamedTuple):
    """An optional column of kernels."""

    key: Literal["tflops", "bytes_per_second", "occupancy", "sm_efficiency"]
    heading: Heading
    format: Callable[[float], str]


def _choose_measures(shown: Sequence[KernelRow]) -> list[_Measure]:
    """Return the columns of which a kernel that is shown has a value."""
    # The names need the room where all multiprocessors are used. Collectives use few of them on purpose.
    collective_kinds = {kind for kind, _ in COLLECTIVE_KINDS}
    leaves_some_idle = any(
        row["sm_efficiency"] is not None
        and row["sm_efficiency"] < FULL_EFFICIENCY
        and row["kind"] not in collective_kinds
        for row in shown
    )
    return [
        measure
        for measure in _MEASURES
        if any(row[measure.key] is not None for row in shown)
        and (measure.key != "sm_efficiency" or leaves_some_idle)
    ]


def _format_measure(measure: _Measure, group: Sequence[KernelRow]) -> str:
    """Return the mean of the kernels of one name, weighted by their time."""
    mean = _compute_mean([row[measure.key] for row in group], [row["total_seconds"] for row in group])
    return NONE if mean is None else measure.format(mean)


def _compute_mean(values: Sequence[float | None], weights: Iterable[float]) -> float | None:
    """Return the mean of the known values, weighted; None if none is known."""
    known = [
        (value, weight) for value, weight in zip(values, weights, strict=True) if value is not None and weight
    ]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


_MEASURES = (
    _Measure("tflops", Heading("TFLOP/s"), format_three_digits),
    _Measure("bytes_per_second", Heading("GB/s"), lambda value: format_three_digits(value / 1e9)),
    _Measure("occupancy", Heading("occupancy", "achieved occupancy, as CUPTI estimates it"), format_share),
    _Measure(
        "sm_efficiency", Heading("SMs used", "share of multiprocessors that have a block"), format_share
    ),
)
