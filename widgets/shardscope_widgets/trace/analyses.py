"""Pages of the analysis: steps, collectives, idle time, stragglers, the critical path and modules."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from shardscope.core.number_format import Scale, format_count
from shardscope.timing.report import format_seconds
from shardscope.trace import Trace
from shardscope.trace.analysis.breakdown import compute_idle
from shardscope.trace.analysis.collectives import (
    AxisRow,
    CollectiveRow,
    Collectives,
    find_gloo_note,
    list_step_seconds,
)
from shardscope.trace.analysis.critical_path import CriticalPath
from shardscope.trace.analysis.launches import LaunchRow
from shardscope.trace.analysis.stragglers import SIGNIFICANCE, format_chance
from shardscope_widgets.kit.numbers import Unit, format_three_digits
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


def describe_steps(trace: Trace) -> AnalysisPage:
    """Return the steps of all ranks, slowest first."""
    steps = sorted(trace.steps(), key=lambda row: -row["span_seconds"])
    if not steps:
        return AnalysisPage(
            sentences=[
                "The recording has no marks of steps. torch.profiler writes them if it has a schedule= and "
                "prof.step() is called after each step, as in runs of Shardscope."
            ]
        )
    scale = Scale.for_seconds(steps[0]["span_seconds"])
    writer = TableWriter()
    rows = [
        Row(
            (
                f"step {row['step']} of rank {row['rank']}",
                scale.format(row["span_seconds"]),
                scale.format(row["compute_seconds"]),
                scale.format(row["exposed_communication_seconds"]),
                scale.format(row["copy_seconds"]),
                scale.format(row["idle_seconds"]),
            ),
            Interval(row["start_seconds"], row["start_seconds"] + row["span_seconds"], row["rank"]),
            "much longer than the others" if row["is_outlier"] else "",
        )
        for row in steps
    ]
    headings = (
        Heading("step"),
        Heading(f"total, {scale.unit}"),
        Heading("compute"),
        Heading("exposed comm.", "communication during which the rank computes nothing"),
        Heading("copies", "copies not overlapped with compute or communication"),
        Heading("idle"),
    )
    num_outliers = sum(row["is_outlier"] for row in steps)
    spans = [row["span_seconds"] for row in steps]
    count = _count_steps([row["rank"] for row in steps])
    shortest, longest = format_seconds(min(spans)), format_seconds(max(spans))
    sentence = f"{count} took {shortest} to {longest}; slowest first."
    if num_outliers:
        sentence += f" {num_outliers:,} took much longer than the rank's others."
    return AnalysisPage(
        sentences=[sentence], tables=[writer.write(headings, rows)], intervals=writer.intervals
    )


def _count_steps(ranks: Sequence[int]) -> str:
    """Return how many steps these are, which have one rank each."""
    by_rank = Counter(ranks)
    if len(by_rank) == 1:
        return format_count(len(ranks), "step")
    if len(set(by_rank.values())) == 1:
        return f"{format_count(by_rank[ranks[0]], 'step')} on each of {len(by_rank):,} ranks"
    return f"{format_count(len(ranks), 'step')} on {len(by_rank):,} ranks"


def describe_collectives(trace: Trace) -> AnalysisPage:
    """Return collectives by mesh axis and kind, per step, and what a step would take without each axis."""
    collectives = trace.collectives()
    if not collectives:
        alone = trace.world_size == 1
        return AnalysisPage(
            sentences=[
                "One rank alone has no collectives."
                if alone
                else "No collective was recorded on any rank of this trace."
            ]
        )
    rows = collectives.sum_by_axis()
    scale = Scale.for_seconds(max(row["seconds"] for row in rows))
    writer = TableWriter()
    written = []
    sizes = [_compute_mean_size(collectives, row) for row in rows]
    unit = Unit.for_column(size for size in sizes if size is not None)
    for row, size in zip(rows, sizes, strict=True):
        calls = _select_calls(collectives, row)
        longest = max(calls, key=lambda one: one["exposed_seconds"])
        start = longest["start_seconds"]
        bandwidth = row["bus_bandwidth"]
        written.append(
            Row(
                (
                    name_kind(row["kind"]) + (f" of {row['axis']}" if row["axis"] else ""),
                    format_calls(row["num_calls"]),
                    NONE if size is None else format_three_digits(size / unit.num_bytes),
                    scale.format(row["seconds"]),
                    NONE if row["skew_seconds"] is None else scale.format(row["skew_seconds"]),
                    NONE if row["transfer_seconds"] is None else scale.format(row["transfer_seconds"]),
                    scale.format(row["exposed_seconds"]),
                    NONE if bandwidth is None else format_three_digits(bandwidth / 1e9),
                ),
                Interval(start, start + longest["seconds"], longest["rank"], longest["track"]),
            )
        )
    headings = (
        Heading("collective"),
        Heading("calls a step" if has_steps(trace) else "calls"),
        Heading(f"mean size, {unit.name}", "of one call"),
        Heading(f"{name_total(trace)}, {scale.unit}", "mean over ranks"),
        Heading("waiting", "time before the last rank arrived, mean over ranks"),
        Heading("transfer", "the shortest duration of all ranks"),
        Heading("exposed", "time during which the rank computes nothing, mean over ranks"),
        Heading("bus GB/s", "bytes on a link over transfer time; compares with the speed of a link"),
    )
    sentences = [
        _describe_what_if(trace, collectives, axis)
        for axis in dict.fromkeys(row["axis"] for row in rows if row["exposed_seconds"] > 0)
    ]
    if all(row["transfer_seconds"] is None for row in rows):
        sentences.append(
            "This trace has only one rank of each collective, so waiting and transfer cannot be separated."
        )
    if note := find_gloo_note(trace):
        sentences.append(note)
    return AnalysisPage(
        sentences=sentences, tables=[writer.write(headings, written)], intervals=writer.intervals
    )


def _select_calls(collectives: Collectives, row: AxisRow) -> list[CollectiveRow]:
    """Return the calls that ``row`` sums up: those of its kind over its mesh axis."""
    return [
        one for one in collectives.list_in_steps() if (one["axis"], one["kind"]) == (row["axis"], row["kind"])
    ]


def _compute_mean_size(collectives: Collectives, row: AxisRow) -> float | None:
    sizes = [one["num_bytes"] for one in _select_calls(collectives, row) if one["num_bytes"] is not None]
    return sum(sizes) / len(sizes) if sizes else None


def _describe_what_if(trace: Trace, collectives: Collectives, axis: str) -> str:
    """Return the step without an axis's communication, and which rank decides it if ranks differ."""
    text = collectives.what_if(axis).text
    steps = list_step_seconds(trace)
    gains = dict.fromkeys(steps, 0.0)
    for row in collectives.list_in_steps():
        if row["axis"] == axis:
            gains[row["rank"]] += row["exposed_seconds"] / steps[row["rank"]][1]
    # A rank that the others wait for has little exposed communication, and no step is shorter than its own.
    slowest = max(steps, key=lambda rank: steps[rank][0] - gains[rank])
    mean = sum(gains.values()) / len(gains)
    if gains[slowest] > 0.9 * mean:
        return text
    per_step = " of a step" if has_steps(trace) else ""
    return (
        f"{text} It is {format_seconds(mean)}{per_step} on average over ranks, but only "
        f"{format_seconds(gains[slowest])} on rank {slowest}, for which the others wait."
    )


def describe_idle(trace: Trace) -> AnalysisPage:
    """Return idle time by cause and rank, most first, and the launch delays of GPU streams."""
    rows_of_idle = compute_idle(trace, in_steps=True)
    idle = sorted((row for row in rows_of_idle if row["seconds"] > 0), key=lambda row: -row["seconds"])
    if not idle:
        return AnalysisPage(sentences=["No rank was idle during the recording."])
    counts = {rank: num_steps for rank, (_, num_steps) in list_step_seconds(trace).items()}
    scale = Scale.for_seconds(max(row["seconds"] / counts[row["rank"]] for row in idle))
    gap_scale = Scale.for_column(row["end_seconds"] - row["start_seconds"] for row in idle[:MAX_ROWS])
    writer = TableWriter()
    rows = [
        Row(
            (
                f"{row['cause']}, rank {row['rank']}",
                scale.format(row["seconds"] / counts[row["rank"]]),
                format_share(row["share"]),
                gap_scale.format(row["end_seconds"] - row["start_seconds"]),
            ),
            _create_interval(row["start_seconds"], row["end_seconds"], row["rank"], row["track"]),
        )
        for row in idle
    ]
    headings = (
        Heading("idle time"),
        Heading(f"{name_total(trace)}, {scale.unit}"),
        Heading(
            "share", "share of the rank's steps" if has_steps(trace) else "share of the rank's recording"
        ),
        Heading(f"longest gap, {gap_scale.unit}"),
    )
    tables = [writer.write(headings, rows)]
    launches = trace.launches()
    if launches:
        tables.append(_write_launches(writer, launches))
    sentences = []
    if has_gpu_work(trace):
        sentences.append(
            "Host-bound: the work that ends the gap was launched after the gap had begun. If it then waited "
            "for more than 0.2 ms, the rest of the gap is other idle time."
        )
    else:
        sentences.append(f"{NO_GPU}: host-bound is the time between operators, in Python and the dispatcher.")
    return AnalysisPage(sentences=sentences, tables=tables, intervals=writer.intervals)


def _write_launches(writer: TableWriter, launches: Sequence[LaunchRow]) -> str:
    """Return the table of launch delays and queues of GPU streams."""
    # The medians decide: a longest delay is many times as long.
    scale = Scale.for_column(row["median_delay_seconds"] for row in launches[:MAX_ROWS])
    delays = []
    for row in launches:
        cells = (
            f"{row['track']}, rank {row['rank']}",
            f"{row['num_launches']:,}",
            scale.format(row["median_delay_seconds"]),
            scale.format(row["max_delay_seconds"]),
            f"{row['mean_queue_length']:,.1f}",
            f"{row['max_queue_length']:,}",
        )
        end = row["start_seconds"] + row["max_delay_seconds"]
        delays.append(Row(cells, _create_interval(row["start_seconds"], end, row["rank"], row["track"])))
    headings = (
        Heading("stream"),
        Heading("launches"),
        Heading(f"median delay, {scale.unit}", "from the launch to the begin of the work"),
        Heading("longest delay"),
        Heading("mean queue", "launched work that has not begun"),
        Heading("longest queue"),
    )
    return writer.write(headings, delays, title="Launches")


def describe_stragglers(trace: Trace) -> AnalysisPage:
    """Return how late each rank arrives at collectives, latest first."""
    stragglers = trace.stragglers()
    if len(trace.ranks) < 2 or all(row["p_value"] is None for row in stragglers):
        return AnalysisPage(sentences=[stragglers.text])
    rows = sorted(stragglers, key=lambda row: -row["late_seconds"])
    scale = Scale.for_seconds(max(rows[0]["late_seconds"], 1e-9))
    writer = TableWriter()
    headings = [
        Heading("rank"),
        Heading(
            f"late {'per step' if has_steps(trace) else 'in all'}, {scale.unit}",
            "after the median of the other ranks",
        ),
        Heading(
            "chance",
            "probability that one of equally fast ranks would be as late at these collectives; that of a "
            f"straggler is {format_chance(SIGNIFICANCE)} or less",
        ),
    ]
    has_stragglers = any(row["is_straggler"] for row in rows)
    if has_stragglers:
        headings.append(Heading("", is_text=True))
    written = []
    for row in rows:
        cells = [
            f"rank {row['rank']}",
            scale.format(row["late_seconds"]),
            NONE if row["p_value"] is None else format_chance(row["p_value"]),
        ]
        if has_stragglers:
            cells.append("straggler" if row["is_straggler"] else "")
        written.append(Row(cells))
    return AnalysisPage(sentences=[stragglers.text], tables=[writer.write(headings, written)])


def describe_critical_path(trace: Trace) -> AnalysisPage:
    """Return what the critical path consists of, by kind in a sentence and by name in a table."""
    path: CriticalPath = trace.critical_path()
    if not path:
        return AnalysisPage(sentences=["Nothing was recorded that a critical path could go through."])
    shares = ", ".join(f"{row['kind']} {format_share(row['share'])}" for row in path.sum_by_kind())
    num_ranks = len({row["rank"] for row in path})
    across = f" across {num_ranks:,} ranks" if num_ranks > 1 else ""
    num_steps = trace.activity.num_steps
    of_step = f"{format_seconds(path.seconds / num_steps)} a step, " if num_steps > 1 else ""
    of_steps = f" of {num_steps:,} steps" if num_steps > 1 else ""
    sentence = (
        f"The chain of work and waits that ends last takes {of_step}{format_seconds(path.seconds)}"
        f"{of_steps}, in {len(path):,} parts{across}; {shares}. Only what is on it makes a step shorter."
    )
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, row in enumerate(path):
        groups[row["name"], row["kind"]].append(number)
    totals = [
        ((name, kind), numbers, sum(path[number]["seconds"] for number in numbers))
        for (name, kind), numbers in groups.items()
    ]
    totals.sort(key=lambda total: -total[2])
    scale = Scale.for_seconds(totals[0][2] / num_steps)
    longest_scale = Scale.for_column(
        max(path[number]["seconds"] for number in numbers) for _, numbers, _ in totals[:MAX_ROWS]
    )
    writer = TableWriter()
    rows = []
    for (name, kind), numbers, seconds in totals:
        longest = path[max(numbers, key=lambda number: path[number]["seconds"])]
        start = longest["start_seconds"]
        rows.append(
            Row(
                (
                    name,
                    kind,
                    format_calls(len(numbers) / num_steps),
                    scale.format(seconds / num_steps),
                    format_share(seconds / path.seconds if path.seconds else 0.0),
                    longest_scale.format(longest["seconds"]),
                ),
                _create_interval(start, start + longest["seconds"], longest["rank"], longest["track"]),
            )
        )
    headings = (
        Heading("part of the path"),
        Heading("kind", is_text=True),
        Heading("times a step" if has_steps(trace) else "times"),
        Heading(f"{name_total(trace)}, {scale.unit}"),
        Heading("share", "share of the path"),
        Heading(f"longest, {longest_scale.unit}", "the longest part"),
    )
    return AnalysisPage(
        sentences=[sentence],
        tables=[writer.write(headings, rows)],
        intervals=writer.intervals,
        path=list(path),
    )


def describe_modules(trace: Trace) -> AnalysisPage:
    """Return the time of each ``nn.Module``, averaged over ranks, most first."""
    modules = trace.modules()
    if not modules:
        return AnalysisPage(
            sentences=[
                "Time by nn.Module needs Python stacks, which this recording does not have. "
                + describe_option("stacks")
            ]
        )
    num_steps = trace.activity.steps_by_rank
    totals: dict[str, list[float]] = {}
    for row in modules:
        total = totals.setdefault(row["module"], [0.0, 0.0, 0.0, 0.0])
        values = (row["num_calls"], row["forward_seconds"], row["backward_seconds"], row["host_seconds"])
        for position, value in enumerate(values):
            total[position] += value / num_steps[row["rank"]] / len(trace.ranks)
    ordered = sorted(totals.items(), key=lambda item: (-item[1][1] - item[1][2], -item[1][3]))
    scale = Scale.for_seconds(max(max(values[1:]) for values in totals.values()))
    work = "kernels" if has_gpu_work(trace) else "operators"
    writer = TableWriter()
    rows = [
        Row((name, format_calls(calls), scale.format(forward), scale.format(backward), scale.format(host)))
        for name, (calls, forward, backward, host) in ordered
    ]
    headings = (
        Heading("module"),
        Heading("calls a step" if has_steps(trace) else "calls"),
        Heading(f"forward, {scale.unit}", f"{work} launched in its forward, modules inside left out"),
        Heading("backward", f"{work} of the backward of those operators"),
        Heading("on the CPU", "duration of its calls, with the modules inside"),
    )
    whole = "a step" if has_steps(trace) else "the recording"
    sentence = f"Time of the {work} of each module in {whole}, without the modules inside; mean over ranks."
    return AnalysisPage(sentences=[sentence], tables=[writer.write(headings, rows)])


def _create_interval(start: float, end: float, rank: int, track: str) -> Interval | None:
    return Interval(start, end, rank, track or None) if end > start else None
