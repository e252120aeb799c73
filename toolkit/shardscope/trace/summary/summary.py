"""``trace.summary()``: the main findings as sentences, each with its numbers and where to look."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np

from shardscope.core.html_table import render_html_table
from shardscope.core.number_format import format_count
from shardscope.timing.report import format_seconds
from shardscope.trace.analysis.breakdown import BreakdownRow, StepRow
from shardscope.trace.analysis.collectives import measure_step
from shardscope.trace.analysis.intervals import measure_within, merge_intervals
from shardscope.trace.analysis.kernels import shorten_name
from shardscope.trace.analysis.stragglers import find_stragglers
from shardscope.trace.nesting import compute_union_ns
from shardscope.trace.store import Trace
from shardscope.trace.summary.causes import Cause, find_causes, format_number_of
from shardscope.trace.summary.suggestions import suggest_change
from shardscope.trace.table import Table
from shardscope.trace.tiles import NameTotals, Tiler

if TYPE_CHECKING:
    import pandas as pd

    from shardscope.core.plan import Plan

NO_BREAK = "\u00a0"
NUM_OPERATORS = 10
SHOWN_RANKS = 32
MAX_NAME_CHARACTERS = 120
MAX_OUTLIERS = 3
"""Number of slow steps with a sentence, the slowest."""
MAX_CAUSES = 5
"""Number of causes with a sentence, most time first."""


class RankTimes(TypedDict):
    """Times of one rank."""

    rank: int
    slices: int
    start_seconds: float
    span_seconds: float
    cpu_busy_seconds: float
    gpu_busy_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_communication_seconds: float
    idle_seconds: float


TimeColumn = Literal[
    "span_seconds",
    "cpu_busy_seconds",
    "gpu_busy_seconds",
    "compute_seconds",
    "communication_seconds",
    "exposed_communication_seconds",
    "idle_seconds",
]


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """One result of the summary."""

    text: str
    rank: int | None = None
    """The rank, track and time to look at; None if the sentence is about the whole trace."""
    track: str | None = None
    start_seconds: float | None = None
    end_seconds: float | None = None
    plan: Plan | None = None
    """A changed plan that would help; None if there is none."""
    gain_seconds: float | None = None
    """Predicted seconds that a step gains with that plan."""

    def __str__(self) -> str:
        return self.text


class SentenceRow(TypedDict):
    """One sentence as a row."""

    sentence: str
    rank: int | None
    track: str | None
    start_seconds: float | None
    end_seconds: float | None
    gain_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """Sentences and numbers of a trace, shown as HTML tables in notebooks."""

    findings: tuple[Sentence, ...]
    """Main results, most important first: each a text with its numbers, where to look, and a changed plan."""
    ranks: Table[RankTimes]
    """A row per rank: the columns of :class:`RankTimes`.

    Busy means that at least one operator, runtime call or kernel ran; annotations and Python frames do not
    count, because they span idle time too. The other times are those of ``trace.breakdown()``.
    """
    operators: Table[NameTotals]
    """Operators and kernels by self time: ``name``, ``slices``, ``self_seconds``, ``total_seconds``."""

    def __iter__(self) -> Iterator[Sentence]:
        return iter(self.findings)

    @property
    def sentences(self) -> tuple[str, ...]:
        """Texts of :attr:`findings`."""
        return tuple(finding.text for finding in self.findings)

    def to_frame(self) -> pd.DataFrame:
        """Return the sentences as a pandas data frame, with where to look and what a change would gain."""
        rows: list[SentenceRow] = [
            {
                "sentence": finding.text,
                "rank": finding.rank,
                "track": finding.track,
                "start_seconds": finding.start_seconds,
                "end_seconds": finding.end_seconds,
                "gain_seconds": finding.gain_seconds,
            }
            for finding in self.findings
        ]
        return Table(rows, tuple(SentenceRow.__annotations__)).to_frame()

    def __str__(self) -> str:
        lines = [*self.sentences, "", "Most self time:"]
        for row in self.operators:
            name, seconds = (
                shorten_name(row["name"], MAX_NAME_CHARACTERS),
                format_seconds(row["self_seconds"]),
            )
            lines.append(f"  {name}: {seconds} in {format_count(row['slices'], 'call')}")
        return "\n".join(lines if self.operators else self.sentences)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from html import escape

        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in self.sentences)
        names = [
            (
                shorten_name(row["name"], MAX_NAME_CHARACTERS),
                row["slices"],
                format_seconds(row["self_seconds"]),
                format_seconds(row["total_seconds"]),
            )
            for row in self.operators
        ]
        operators = (
            render_html_table(("name", "calls", "self", "total"), names, "Most self time") if names else ""
        )
        return f"<ul>{items}</ul>{self.render_rank_table()}{operators}"

    def render_rank_table(self) -> str:
        """Return the table of ranks, up to :data:`SHOWN_RANKS`, without the columns that are empty."""
        columns: dict[str, TimeColumn] = {
            "span": "span_seconds",
            "CPU busy": "cpu_busy_seconds",
            "GPU busy": "gpu_busy_seconds",
            "compute": "compute_seconds",
            "communication": "communication_seconds",
            "exposed communication": "exposed_communication_seconds",
            "idle": "idle_seconds",
        }
        # A trace of CPU ranks has no GPU times: leave those columns out.
        shown = {title: key for title, key in columns.items() if any(row[key] for row in self.ranks)}
        rows = [
            (row["rank"], row["slices"], *(_format_with_share(row, key) for key in shown.values()))
            for row in self.ranks[:SHOWN_RANKS]
        ]
        caption = (
            f"The first {SHOWN_RANKS} of {len(self.ranks):,} ranks" if len(self.ranks) > SHOWN_RANKS else ""
        )
        return render_html_table(("rank", "slices", *shown), rows, caption)


def _format_with_share(row: RankTimes, key: TimeColumn) -> str:
    """Return seconds as text, with their share of the rank's span."""
    seconds, span = row[key], row["span_seconds"]
    text = format_seconds(seconds)
    if key != "span_seconds" and span:
        text += f" ({100 * seconds / span:.0f} %)"
    return text.replace(" ", NO_BREAK)


def summarize(trace: Trace) -> TraceSummary:
    """Return the summary of ``trace``; see :meth:`Trace.summary`."""
    return TraceSummary(
        findings=tuple(_write_sentences(trace)) if len(trace) else (Sentence(text=_describe_size(trace)),),
        ranks=Table(list_rank_times(trace)),
        operators=Table(sum_operators(trace)[:NUM_OPERATORS]),
    )


def sum_operators(trace: Trace) -> list[NameTotals]:
    """Return the totals of operators and kernels by name, most self time first."""
    # All names, because annotations are removed from the list only afterwards.
    totals = Tiler(trace).sum_by_name(0, max(trace.duration_ns_total, 1), limit=len(trace.names))
    is_annotation = trace.activity.is_wrapper & ~trace.activity.is_compute
    annotations = {trace.names[i] for i in np.unique(trace.name_index[is_annotation])}
    return [row for row in totals if row["name"] not in annotations]


def list_rank_times(trace: Trace) -> list[RankTimes]:
    """Return the times of each rank."""
    activity = trace.activity
    works = ~activity.is_wrapper

    def sum_busy_seconds(index: slice[int, int, None], on_gpu: bool) -> float:
        mask = works[index] & (activity.on_gpu[index] == on_gpu)
        return compute_union_ns(trace.start_ns[index][mask], activity.end_ns[index][mask]) / 1e9

    return [
        {
            "rank": row["rank"],
            "slices": rank.index.stop - rank.index.start,
            "start_seconds": row["start_seconds"],
            "span_seconds": row["span_seconds"],
            "cpu_busy_seconds": sum_busy_seconds(rank.index, False),
            "gpu_busy_seconds": sum_busy_seconds(rank.index, True),
            "compute_seconds": row["compute_seconds"],
            "communication_seconds": row["communication_seconds"],
            "exposed_communication_seconds": row["exposed_communication_seconds"],
            "idle_seconds": row["idle_seconds"],
        }
        for rank, row in zip(activity.ranks, trace.breakdown(), strict=True)
    ]


def _write_sentences(trace: Trace) -> Iterator[Sentence]:
    """Yield the sentences: what was recorded, where a step's time goes, what costs most, and comparisons."""
    steps, step_seconds = trace.steps(), measure_step(trace)
    yield Sentence(text=_describe_size(trace))
    # One sentence, because pages have it as a heading: shares of several GPUs mislead without that of each.
    yield Sentence(text=f"{_describe_shares(trace, steps)} {_describe_several_gpus(trace)}".rstrip())
    if trace.cut_off:
        yield Sentence(text=_describe_cut_off(trace))
    if not step_seconds:
        return  # no recorded slice has any length
    collectives = trace.collectives()
    causes = find_causes(trace, collectives, step_seconds)
    # The user's own function may train another model: changes and parts of the plan do not apply to it.
    plan = trace.plan if trace.trains_the_plan else None
    suggested: set[str] = set()
    for cause in causes[:MAX_CAUSES]:
        yield _add_suggestion(plan, cause, suggested)
    yield from _describe_outliers(steps)
    if len(trace.ranks) > 1:
        yield Sentence(text=find_stragglers(trace, collectives).text)
    if plan is not None:
        # Without a calibration of this machine there is no prediction.
        with suppress(ValueError):
            yield Sentence(text=trace.compare(plan).text)


def describe_recording(trace: Trace) -> str:
    """Return ranks, slices and duration as a sentence, which needs no analysis of the trace."""
    return f"{_count_ranks(trace)}, {_describe_slices(trace)}."


def _count_ranks(trace: Trace) -> str:
    num_ranks = "1 rank" if len(trace.ranks) == 1 else f"{len(trace.ranks):,} ranks"
    return f"{num_ranks} of {trace.world_size:,}" if trace.world_size > len(trace.ranks) else num_ranks


def _describe_slices(trace: Trace) -> str:
    return f"{format_number_of(len(trace), 'slice')} in {format_seconds(trace.duration_seconds)}"


def _describe_size(trace: Trace) -> str:
    num_ranks, recorded = _count_ranks(trace), _describe_slices(trace)
    counts = [len(rank.steps) for rank in trace.activity.ranks if rank.steps]
    if not counts:
        return f"{num_ranks}, {recorded}, without marks of steps."
    steps = format_number_of(max(counts), "step")
    if min(counts) < max(counts):
        steps = f"{min(counts):,} to {steps}"
    return f"{num_ranks}, {steps} of {format_seconds(measure_step(trace))}; {recorded}."


def _describe_shares(trace: Trace, steps: Table[StepRow]) -> str:
    """Return where the time goes, as shares: the range over ranks where they differ."""
    rows: Table[StepRow] | Table[BreakdownRow] = steps or trace.breakdown()
    shares: dict[str, list[float]] = {}
    for rank in trace.ranks:
        rank_rows = [row for row in rows if row["rank"] == rank]
        span = sum(row["span_seconds"] for row in rank_rows)
        if not span:
            continue
        for title, key in _SHARES:
            shares.setdefault(title, []).append(100 * sum(row[key] for row in rank_rows) / span)
    parts = [
        f"{_format_range(min(values), max(values))} % {title}"
        for title, values in shares.items()
        if max(values) >= 0.5 or title in ("compute", "idle")
    ]
    if not parts:
        return "No step has any length."
    whole = "a step" if steps else "the recording"
    if any(rank.on_gpu for rank in trace.activity.ranks):
        subject = f"GPU time of {whole}"
    elif any(_LAUNCH.match(name) for name in trace.names):
        subject = f"The GPUs' work was not recorded; time of the CPU threads that launch it, of {whole}"
    else:
        subject = f"{whole.capitalize()} on CPU ranks"
    return f"{subject}: {', '.join(parts)}."


def _describe_cut_off(trace: Trace) -> str:
    """Return a sentence on ranks whose files end in the middle, as of a profiler that was killed.

    Kineto writes the work of the GPU after that of the CPU, in no order of time: any of it may be missing.
    """
    has_gpus = any(track.kind == "gpu" for track in trace.tracks) or any(map(_LAUNCH.match, trace.names))
    missing = "What is missing, first of all work on the GPU," if has_gpus else "What is missing"
    numbers = sorted(trace.cut_off)
    files = f"The file of rank {numbers[0]} ends"
    if len(numbers) > 1:
        listed = ", ".join(map(str, numbers[:SHOWN_RANKS])) + (" ..." if len(numbers) > SHOWN_RANKS else "")
        files = f"The files of ranks {listed} end"
    return (
        f"{files} in the middle. {missing} counts as idle time: "
        "record these steps again before you conclude anything from the shares."
    )


def _describe_several_gpus(trace: Trace) -> str:
    """Return a sentence on ranks with several GPUs, as of ``device_map="auto"``; empty if there are none."""
    activity = trace.activity
    processes = [str(track.process) for track in trace.tracks]
    shares: dict[int, list[float]] = {}
    for rank in activity.ranks:
        work = np.flatnonzero(activity.is_gpu_work[rank.index]) + rank.index.start
        names = np.array(processes)[trace.track_index[work]]
        gpus = np.unique(names)
        if len(gpus) < 2:
            continue
        start = rank.steps[0].start_ns if rank.steps else rank.start_ns
        end = rank.steps[-1].end_ns if rank.steps else rank.end_ns
        for gpu in gpus:
            own = work[names == gpu]
            busy = merge_intervals(trace.start_ns[own], activity.end_ns[own])
            (busy_ns,) = measure_within(busy, np.array([start]), np.array([end])).tolist()
            shares.setdefault(rank.rank, []).append(100 * busy_ns / max(end - start, 1))
    if not shares:
        return ""
    first, values = next(iter(shares)), [share for one in shares.values() for share in one]
    others = f", as do {format_number_of(len(shares) - 1, 'other rank')}" if len(shares) > 1 else ""
    whole = "a step" if activity.has_steps else "the recording"
    return (
        f"Rank {first} has work on {len(shares[first])} GPUs{others}: these shares count time in which "
        f"any of them works; each alone is busy {_format_range(min(values), max(values))} % of {whole}."
    )


_LAUNCH = re.compile(r"(?:cuda|hip)Launch|nccl:|rccl:")
"""Names on the CPU of a rank with a GPU."""

_SHARES: tuple[
    tuple[str, Literal["compute_seconds", "exposed_communication_seconds", "copy_seconds", "idle_seconds"]],
    ...,
] = (
    ("compute", "compute_seconds"),
    ("exposed communication", "exposed_communication_seconds"),
    ("copies", "copy_seconds"),
    ("idle", "idle_seconds"),
)


def _format_range(low: float, high: float) -> str:
    return f"{low:.0f}" if f"{low:.0f}" == f"{high:.0f}" else f"{low:.0f} to {high:.0f}"


def _add_suggestion(plan: Plan | None, cause: Cause, suggested: set[str]) -> Sentence:
    """Return the cause as a sentence, with the change that is predicted to help most, if it is a new one."""
    rank, track, start, end = cause["interval"]
    suggestions = [suggest_change(plan, topic) for topic in cause["topics"]] if plan is not None else []
    possible = [one for one in suggestions if one is not None]
    best = max(possible, key=lambda one: one.gain_seconds, default=None)
    if best is None or best.text in suggested:
        return Sentence(
            text=cause["text"], rank=rank, track=track or None, start_seconds=start, end_seconds=end
        )
    suggested.add(best.text)
    # Both are predicted: the measured step of the sentence before may be longer.
    share = f"{100 * best.gain_seconds / best.predicted_seconds:.0f} %"
    gain = f"{format_seconds(best.gain_seconds)} of the predicted {format_seconds(best.predicted_seconds)}"
    return Sentence(
        text=f"{cause['text']} Change: {best.text}, predicted to gain {gain} of a step ({share}).",
        rank=rank,
        track=track or None,
        start_seconds=start,
        end_seconds=end,
        plan=best.plan,
        gain_seconds=best.gain_seconds,
    )


def _describe_outliers(steps: Table[StepRow]) -> Iterator[Sentence]:
    """Yield one sentence about each slow step of any rank; of many, the slowest and how many there are."""
    usual = {rank: _find_median(steps, rank, "span_seconds") for rank in {row["rank"] for row in steps}}
    of_step: dict[int, list[StepRow]] = {}
    for row in steps:
        if row["is_outlier"]:
            of_step.setdefault(row["step"], []).append(row)
    worst = {
        number: max(rows, key=lambda row: row["span_seconds"] - usual[row["rank"]])
        for number, rows in of_step.items()
    }
    slowest = sorted(worst, key=lambda number: usual[worst[number]["rank"]] - worst[number]["span_seconds"])
    for number in sorted(slowest[:MAX_OUTLIERS]):
        yield _describe_outlier(steps, worst[number], len(of_step[number]))
    others = len(slowest) - MAX_OUTLIERS
    if others > 0:
        yield Sentence(text=f"{format_number_of(others, 'more step')} took much longer than the median.")


def _find_median(
    steps: Table[StepRow],
    rank: int,
    key: Literal[
        "span_seconds", "compute_seconds", "exposed_communication_seconds", "copy_seconds", "idle_seconds"
    ],
) -> float:
    return float(np.median([row[key] for row in steps if row["rank"] == rank]))


def _describe_outlier(steps: Table[StepRow], row: StepRow, num_ranks: int) -> Sentence:
    """Return a sentence about a slow step: the part that grew most over its rank's median step."""
    usual = _find_median(steps, row["rank"], "span_seconds")
    title, more = max(
        ((title, row[key] - _find_median(steps, row["rank"], key)) for title, key in _SHARES),
        key=lambda pair: pair[1],
    )
    others = f"; it was slow on {format_number_of(num_ranks - 1, 'other rank')}, too" if num_ranks > 1 else ""
    return Sentence(
        text=f"Step {row['step']} of rank {row['rank']} took {format_seconds(row['span_seconds'])}, the "
        f"median is {format_seconds(usual)}: {format_seconds(max(more, 0.0))} more {title}{others}.",
        rank=row["rank"],
        start_seconds=row["start_seconds"],
        end_seconds=row["start_seconds"] + row["span_seconds"],
    )
